#!/bin/sh
# Builds the C++ tests of the scheduler for CTest; incremental. cmake and ninja come from .venv.
# Usage: build_cpp_tests.sh [FOLDER [CMAKE-OPTION...]]
set -eu
folder=${1:-build/cpp-tests}
[ $# -eq 0 ] || shift
cmake -S scheduler -B "$folder" -G Ninja -DTOKENSPEED_SCHEDULER_TESTS=ON "$@"
cmake --build "$folder"
