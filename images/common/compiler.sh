#!/bin/sh
# Brings what the builder stage compiles with, as far as the base image lacks it: Python with venv and headers, a C++20
# compiler. A base that has all of it is not touched, and no package mirror is asked.
set -eu
packages=
command -v python3 >/dev/null || packages="python3"
python3 -c 'import venv, ensurepip' 2>/dev/null || packages="$packages python3-venv"
python3 -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null ||
    packages="$packages python3-dev"
command -v g++ >/dev/null || packages="$packages g++"
# One word for each package.
[ -z "$packages" ] || sh "$(dirname "$0")/apt-install.sh" $packages
