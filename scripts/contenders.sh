#!/usr/bin/env bash
# Makes build/contenders/venv with the libraries that the benchmarks measure kvbaton against. What cannot be installed
# is said, and shown as absent in the benchmark's table. Does nothing when it is up to date.
#   scripts/contenders.sh [--sglang]      with SGLang too, for its own managers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SGLANG="sglang==0.5.23"
# What the parts of SGLang that hold its managers import; torch is used on the CPU only.
SGLANG_NEEDS="torch==2.13.0 pyzmq msgspec requests aiohttp psutil orjson pybase64 packaging pydantic fastapi prometheus_client pillow"

say() { echo "contenders: $1" >&2; }
# shellcheck source=scripts/vendor.sh
source scripts/vendor.sh
with_sglang=${1:-}
venv=build/contenders/venv
stamp=$({ pwd; cat scripts/contenders.sh scripts/vendor.sh; fabric_versions; } | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.stamp 2>/dev/null || true)" != "$stamp" ]; then
    say "making $venv (half a GiB)"
    rm -rf $venv
    mkdir -p "$(dirname $venv)"
    ${PYTHON:-.venv/bin/python} -m venv $venv
    $venv/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt numpy ||
        { say "pip could not install numpy: no contender can run"; exit 0; }
    install_fabric_wheels $venv/bin/python || true
    install_fabric_debian || true
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
