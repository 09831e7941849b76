#!/bin/sh
# Fuzzes the scheduler with streams of events for FUZZ_SECONDS (600), sanitized; needs clang++ with libFuzzer, else it says
# SKIP and succeeds. What it finds stays in build/fuzz/corpus for the next run; an input that fails is named at the end.
# With FUZZ_KEEP=1 the few inputs that cover what the corpus covers become scheduler/tests/fuzz/seeds.
set -eu
seconds=${FUZZ_SECONDS:-600}
compiler=
mkdir -p build/fuzz/corpus build/fuzz/failures
for candidate in "${FUZZ_CXX:-clang++}" clang++-19 clang++-18 clang++-17; do
    if command -v "$candidate" > /dev/null && echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
        "$candidate" -x c++ -std=c++20 -fsanitize=fuzzer,address,undefined -o build/fuzz/probe - 2> /dev/null; then
        compiler=$candidate
        break
    fi
done
if [ -z "$compiler" ]; then
    echo "SKIP: no clang++ with libFuzzer (on Debian: clang-19 and libclang-rt-19-dev); FUZZ_CXX names one elsewhere"
    exit 0
fi
cmake -S scheduler -B build/fuzz/cmake -G Ninja -DTOKENSPEED_SCHEDULER_TESTS=ON -DTOKENSPEED_SCHEDULER_FUZZ=ON \
    -DCMAKE_CXX_COMPILER="$compiler" > /dev/null
cmake --build build/fuzz/cmake --target fuzz_events
fuzzer=build/fuzz/cmake/tests/cpp/fuzz_events
status=0
"$fuzzer" -max_total_time="$seconds" -max_len=600 -timeout=30 -print_final_stats=1 -artifact_prefix=build/fuzz/failures/ \
    build/fuzz/corpus scheduler/tests/fuzz/found scheduler/tests/fuzz/seeds > build/fuzz/log 2>&1 || status=$?
grep -E '^(stat::|FAILED|SUMMARY|artifact_prefix|Done)|cov:' build/fuzz/log | grep -vE 'NEW|REDUCE|pulse|INITED|RELOAD' || true
grep -E 'cov:' build/fuzz/log | tail -n 1
if [ "$status" -ne 0 ]; then
    echo "An input failed. See it step by step: TOKENSPEED_FUZZ_TRACE=1 build/cpp-tests/tests/cpp/fuzz_events FILE"
    exit "$status"
fi
if [ -n "${FUZZ_KEEP:-}" ]; then
    rm -rf build/fuzz/kept build/fuzz/control && mkdir build/fuzz/kept
    "$fuzzer" -set_cover_merge=1 -merge_control_file=build/fuzz/control -max_len=600 build/fuzz/kept build/fuzz/corpus \
        scheduler/tests/fuzz/seeds > /dev/null 2>&1
    python3 scripts/choose_seeds.py build/fuzz/control scheduler/tests/fuzz/seeds 48
fi
