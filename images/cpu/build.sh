#!/bin/sh
# Builds the CPU image from this checkout with docker or podman; further arguments go to the build command.
# usage: images/cpu/build.sh [BUILD ARGUMENTS]   (TAG=name:tag, ENGINE=docker|podman)
set -eu
cd "$(dirname "$0")/../.."
tag=${TAG:-tokenspeed-cpu}
engine=${ENGINE:-}
if [ -z "$engine" ]; then
    # The docker command may be there without its daemon.
    if docker info >/dev/null 2>&1; then
        engine=docker
    elif command -v podman >/dev/null 2>&1; then
        engine=podman
    else
        echo "image: neither a running docker nor podman was found: apt install podman" >&2
        exit 2
    fi
fi
format=
[ "$engine" != podman ] || format="--format=docker" # HEALTHCHECK is not in the OCI format
revision=$(git rev-parse --short=12 HEAD 2>/dev/null || true)
exec "$engine" build $format --tag "$tag" --file images/cpu/Dockerfile --build-arg REVISION="$revision" "$@" .
