#!/bin/sh
# Takes the host's C and C++ toolchain out of the CANN image: nothing is compiled for the host when a model is served.
# CANN's own compiler for the device stays: operators are compiled as they are met.
set -eu
# apt refuses names that it does not know, so only what is installed is named. -base packages belong to the libraries.
packages=$(dpkg-query --show --showformat '${Package}\n' |
    grep -E '^(gcc|g\+\+|cpp|gfortran)(-[0-9]+)?(-x86-64-linux-gnu|-aarch64-linux-gnu)?$|^(build-essential|cmake|make)$' || true)
[ -n "$packages" ] || exit 0
# One word for each package.
DEBIAN_FRONTEND=noninteractive apt-get purge --yes $packages
rm -rf /var/log/apt /var/log/dpkg.log
