#!/usr/bin/env bash
# Makes build/contenders/venv with the libraries that the benchmarks measure kvbaton against. What cannot be installed
# is said, and shown as absent in the benchmark's table. Does nothing when it is up to date.
#   scripts/contenders.sh [--sglang]      with SGLang too, for its own managers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NIXL="nixl-cu13==1.5.1"
MOONCAKE="mooncake-transfer-engine-non-cuda==0.3.13.post1"
SGLANG="sglang==0.5.23"
# What the parts of SGLang that hold its managers import; torch is used on the CPU only.
SGLANG_NEEDS="torch==2.13.0 pyzmq msgspec requests aiohttp psutil orjson pybase64 packaging pydantic fastapi prometheus_client pillow"
DEBIAN="libibverbs1 librdmacm1 ibverbs-providers libnuma1"

say() { echo "contenders: $1" >&2; }
with_sglang=${1:-}
venv=build/contenders/venv
stamp=$({ pwd; cat scripts/contenders.sh; } | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.stamp 2>/dev/null || true)" != "$stamp" ]; then
    say "making $venv (half a GiB)"
    rm -rf $venv
    mkdir -p "$(dirname $venv)"
    ${PYTHON:-.venv/bin/python} -m venv $venv
    # Their own dependencies are for GPUs (gigabytes of them); the engines load without.
    pip() { $venv/bin/python -m pip --disable-pip-version-check install -q "$@"; }
    pip -c constraints.txt numpy || { say "pip could not install numpy: no contender can run"; exit 0; }
    for package in $NIXL $MOONCAKE; do
        pip --no-deps "$package" || say "pip could not install $package: it will be absent"
    done
    missing=""
    for package in $DEBIAN; do
        dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
    done
    if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing$missing (Mooncake's engine links with them)"
        # shellcheck disable=SC2086
        { apt-get install -y -q $missing || { apt-get update -q && apt-get install -y -q $missing; }; } >/dev/null 2>&1 ||
            say "apt-get could not install$missing: Mooncake will be absent"
    elif [ -n "$missing" ]; then
        say "Mooncake needs$missing, e.g.: sudo apt-get install$missing"
    fi
    echo "$stamp" >$venv/.stamp
fi
if [ "$with_sglang" = --sglang ] && [ ! -e $venv/.sglang ]; then
    say "installing $SGLANG and what it needs (1.2 GiB more)"
    # shellcheck disable=SC2086
    if $venv/bin/python -m pip --disable-pip-version-check install -q $SGLANG_NEEDS &&
        $venv/bin/python -m pip --disable-pip-version-check install -q --no-deps $SGLANG; then
        touch $venv/.sglang
    else
        say "pip could not install SGLang: its managers will be absent"
    fi
fi
