#!/bin/sh
# Installs Debian or Ubuntu packages and leaves no lists behind. usage: apt-install.sh PACKAGE...
set -eu
. "$(dirname "$0")/network.sh"
# $apt_options is several words or none.
apt-get $apt_options update
apt-get $apt_options install --yes --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/log/apt /var/log/dpkg.log
