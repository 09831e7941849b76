// A state must decide on every event: a row of the table with one missing is not a row.
#include "prelude.h"

using table::no;
#ifdef REFUSED
constexpr table::Row row{no, no, no, no, no, no, no, no, no, no, no, no};
#else
constexpr table::Row row{no, no, no, no, no, no, no, no, no, no, no, no, no};
#endif
static_assert(row.size() == kEventCount);
