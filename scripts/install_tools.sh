#!/bin/sh
# Makes .venv where there is none, and installs what the local distributions are built with.
# usage: install_tools.sh REQUIREMENTS
set -eu
[ -x .venv/bin/python ] || "$(cat .make/python-path)" -m venv .venv
.venv/bin/python -m pip --disable-pip-version-check --no-input install --requirement "$1"
