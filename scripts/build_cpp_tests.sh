#!/bin/sh
# Builds the C++ tests of the scheduler for CTest; incremental. cmake and ninja come from .venv.
set -eu
cmake -S scheduler -B build/cpp-tests -G Ninja -DTOKENSPEED_SCHEDULER_TESTS=ON
cmake --build build/cpp-tests
