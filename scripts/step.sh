#!/bin/sh
# Runs one step of the set-up: says what, every ten seconds that it still runs, and how long it took. Its output goes to a
# log, of which the end is shown where the step fails.
# usage: step.sh NAME WHAT COMMAND...
set -u
name=$1
what=$2
shift 2
log=.make/$name.log
mkdir -p .make
begin=$(date +%s)
printf 'setup: %s ...\n' "$what"
"$@" >"$log" 2>&1 &
child=$!
trap 'kill "$child" 2>/dev/null; exit 130' INT TERM
# The heartbeat ends with the step: it looks every second whether the command still runs.
(
    ticks=0
    while sleep 1 && kill -0 "$child" 2>/dev/null; do
        ticks=$((ticks + 1))
        [ $((ticks % 10)) -ne 0 ] || printf 'setup: %s ... %s s\n' "$what" "$ticks"
    done
) &
heartbeat=$!
wait "$child"
status=$?
kill "$heartbeat" 2>/dev/null
if [ "$status" -ne 0 ]; then
    printf 'setup: %s FAILED; the end of %s:\n' "$what" "$log" >&2
    tail -n 25 "$log" >&2
    exit "$status"
fi
printf 'setup: %s: %s s\n' "$what" "$(($(date +%s) - begin))"
