#!/bin/sh
# Looks for what a machine must have before anything is downloaded, and names the package to install where it is absent.
# usage: preflight.sh PYTHON (a command; empty: look for one). Prints the Python to use on the last line.
set -u

fail() {
    printf 'setup: %s\n' "$1" >&2
    printf '       Debian, Ubuntu:  %s\n       Fedora, RHEL:    %s\n' "$2" "$3" >&2
    exit 2
}

# The packages are tested with 3.11; a newer one is taken only where there is no 3.11.
python=
for candidate in ${1:-python3.11 python3 python3.12 python3.13 python3.14}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$(command -v "$candidate")
        break
    fi
done
[ -n "$python" ] || fail "no Python 3.11 or newer${1:+ (PYTHON=$1)}" \
    "apt install python3 python3-venv python3-dev" "dnf install python3.11 python3.11-devel"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module" \
    "apt install python3-venv" "dnf install python3-libs"
"$python" -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    fail "$python has no headers (Python.h) to build the native modules with" "apt install python3-dev" "dnf install python3-devel"

compiler=${CXX:-}
for candidate in c++ g++ clang++; do
    [ -n "$compiler" ] || ! command -v "$candidate" >/dev/null 2>&1 || compiler=$candidate
done
if [ -z "$compiler" ] || ! command -v "${compiler%% *}" >/dev/null 2>&1; then
    fail "no C++ compiler${CXX:+ (CXX=$CXX)}" "apt install g++" "dnf install gcc-c++"
fi
if ! printf '#include <concepts>\n#include <span>\n#include <omp.h>\nint main() { return 0; }\n' |
    $compiler -std=c++20 -fopenmp -fsyntax-only -x c++ - 2>/dev/null; then
    fail "$compiler does not know C++20 with OpenMP (GCC 11 or newer does)" "apt install g++" "dnf install gcc-c++"
fi
printf '%s\n' "$python"
