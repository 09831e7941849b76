#!/bin/sh
# Builds wheels of this checkout's distributions that the vendor's image holds, and installs them into /opt/tokenspeed.
# Neither step asks a package index, which has other projects under names like ours. usage: wheels.sh VENDOR
set -eu
folders=$(python3 scripts/image_facts.py folders "$1" | sed 's|^|./|')
# One word for each folder.
PATH="/opt/build/bin:$PATH" python -m pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheels $folders
/opt/tokenspeed/bin/python -m pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
