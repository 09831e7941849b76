// What every case starts from: functions that hand out states, declared only, since nothing is run.
#pragma once

#include <type_traits>

#include "fsm/apply.h"
#include "fsm/forward_events.h"
#include "fsm/pd_events.h"

using namespace tokenspeed::fsm;
namespace cache = tokenspeed::cache;

template <typename Type>
Type made();
