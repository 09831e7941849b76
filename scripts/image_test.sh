#!/bin/sh
# Builds images/cpu and serves from it in a container: read-only root, no capabilities, user 10001, health check, drain.
# Needs root, podman and runc; where no registry is reachable it makes a stand-in for the base image with mmdebstrap. Says SKIP
# where the tools cannot be had. usage: scripts/image_test.sh
set -eu
cd "$(dirname "$0")/.."

base=docker.io/library/python:3.11-slim
builder=$base
image=localhost/tokenspeed-cpu:test
name=tokenspeed-image-test
work=$(mktemp -d)
skip() { echo "SKIP image test: $1"; exit 0; }
fail() { echo "image test: $1" >&2; exit 1; }
cleanup() {
    podman rm --force "$name" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

[ "$(id -u)" = 0 ] || skip "needs root"
for tool in podman runc; do
    command -v "$tool" >/dev/null || skip "no $tool (apt install podman runc mmdebstrap catatonit)"
done

# Settings that work without systemd, user namespaces or a network bridge; podman then complains that it has no timers for
# the health check, which is run by hand below.
cat >"$work/containers.conf" <<CONF
[containers]
netns="host"
default_ulimits=["nofile=4096:4096","nproc=8192:8192"]
log_driver="k8s-file"
[engine]
runtime="runc"
cgroup_manager="cgroupfs"
events_logger="file"
CONF
export CONTAINERS_CONF="$work/containers.conf" BUILDAH_ISOLATION=chroot

stand_in() { # image name, packages beside Python
    podman image exists "$1" && return
    echo "image test: making a stand-in for $1"
    mmdebstrap --quiet --variant=minbase --include="python3,python3-pip,python3-venv,ca-certificates,netbase,tzdata${2:+,$2}" \
        --customize-hook='rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED; ln -s python3 "$1"/usr/bin/python' \
        bookworm "$work/base.tar"
    podman import --quiet "$work/base.tar" "$1" >/dev/null
    rm "$work/base.tar"
}
if ! podman image exists "$base" && ! timeout 60 podman pull --quiet "$base" >/dev/null 2>&1; then
    command -v mmdebstrap >/dev/null || skip "no registry is reachable, and no mmdebstrap for a stand-in"
    stand_in "$base" ""
fi
if podman run --rm "$base" sh -c '! [ -e /usr/local/bin/python3 ]'; then
    # The stand-in has Debian's Python, so the compiler stage needs Debian's headers for it.
    builder=localhost/tokenspeed-builder:stand-in
    stand_in "$builder" "python3-dev,g++"
fi

# pip inside the build needs what pip out here is told: a certificate bundle, a folder of wheels.
set --
printf '[global]\n' >"$work/pip.conf"
if [ -n "${PIP_CERT:-}" ]; then
    printf 'cert = /mnt/pip/cert.pem\n' >>"$work/pip.conf"
    set -- "$@" --volume "$PIP_CERT:/mnt/pip/cert.pem:ro"
fi
if [ -d "${PIP_FIND_LINKS:-}" ]; then
    printf 'find-links = /mnt/pip/wheels\n' >>"$work/pip.conf"
    set -- "$@" --volume "$PIP_FIND_LINKS:/mnt/pip/wheels:ro"
fi
echo "image test: building"
begin=$(date +%s)
ENGINE=podman TAG=$image images/cpu/build.sh --network=host --volume "$work/pip.conf:/etc/pip.conf:ro" "$@" \
    --build-arg BASE_IMAGE="$base" --build-arg BUILDER_IMAGE="$builder" >"$work/build.log" 2>&1 ||
    { tail -n 40 "$work/build.log" >&2; fail "the build failed"; }
echo "image test: built in $(($(date +%s) - begin)) s, $(podman image inspect --format '{{.Size}}' "$image") bytes"
podman run --rm --no-healthcheck --entrypoint sh "$image" -c '! command -v g++ && ! command -v cc' || fail "a compiler is in the final stage"

echo "image test: serving"
podman rm --force "$name" >/dev/null 2>&1 || true
podman run --detach --name "$name" --network=none --read-only --tmpfs /tmp --cap-drop=all --init \
    "$image" smollm2-135m --profile smoke >/dev/null 2>"$work/run.log" || { cat "$work/run.log" >&2; fail "it did not start"; }
inside() { podman exec "$name" python -c "$1"; }
tries=0
until inside 'import urllib.request as u; u.urlopen("http://127.0.0.1:8000/ready", timeout=2)' 2>/dev/null; do
    tries=$((tries + 1))
    [ "$tries" -lt 120 ] && [ "$(podman inspect --format '{{.State.Running}}' "$name")" = true ] ||
        { podman logs "$name" >&2; fail "the server did not become ready"; }
    sleep 1
done
[ "$(inside 'import os; print(os.getuid())')" = 10001 ] || fail "not user 10001"
inside '
import json, urllib.request
body = json.dumps({"model": "smollm2-135m-smoke", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", body.encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=60))
assert 1 <= answer["usage"]["completion_tokens"] <= 8, answer
' || { podman logs "$name" >&2; fail "a request failed"; }
podman healthcheck run "$name" >/dev/null || fail "the health check failed"
podman stop --time 40 "$name" >/dev/null 2>"$work/run.log" || { cat "$work/run.log" >&2; fail "it did not stop"; }
status=$(podman inspect --format '{{.State.ExitCode}}' "$name")
case $status in
    0 | 143) ;;
    *) podman logs "$name" >&2; fail "SIGTERM ended it with status $status" ;;
esac
echo "image test: passed (ready after ${tries} s, exit status $status)"
