# Sourced by the build's steps that fetch: what a network with its own certificates wants, as build secrets.
# ca_bundle: a PEM file with all certificates to trust; pip_conf and apt_conf are mounted where pip and apt look for them.
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 DEBIAN_FRONTEND=noninteractive
apt_options=
if [ -e /run/secrets/ca_bundle ]; then
    export PIP_CERT=/run/secrets/ca_bundle
    apt_options="--option Acquire::https::CaInfo=/run/secrets/ca_bundle"
fi
