#!/usr/bin/env bash
# Runs the tests of the mori fabric against the library itself. Arguments go to pytest.
#
# With MORI_BED=folder: in a bed that lets the library run on host memory without an AMD GPU and an RDMA NIC.
# Without: with the amd-mori that is installed for PYTHON (python3.10, else python3), on AMD hardware.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "test-mori: $1" >&2; exit 1; }

bed=${MORI_BED:-}
if [ -n "$bed" ]; then
    bed=$(realpath -m -- "$bed")
    python=$bed/venv/bin/python
    [ -e "$bed/lib/.stamp" ] && [ -x "$python" ] || fail "MORI_BED=$bed is not a bed that was set up (mori-bed setup $bed)"
    export LD_LIBRARY_PATH="$bed/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export MORI_ROCM_SMI_PATH="$bed/lib/librocm_smi64.so.1"
    export SOFTIBV_NS="kvbaton-$$"
    trap 'rm -f "/dev/shm/softibv-$(id -u)-kvbaton-$$"' EXIT
else
    python=${PYTHON:-$(command -v python3.10 || command -v python3 || true)}
fi
[ -n "$python" ] || fail "there is no Python; name one: make test-mori PYTHON=/path/to/python3.10"
"$python" -c 'import mori.io' 2>/dev/null ||
    fail "$python cannot import mori.io: install amd-mori for it, or name a bed: make test-mori MORI_BED=folder"

# An environment of its own: kvbaton and pytest, with the packages of that Python (mori, torch) behind them.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
venv=build/test-mori
stamp=$({ pwd; echo "$site"; "$python" -V; cat pyproject.toml constraints.txt setup.py src/kvbaton/copy/*.[ch]; } | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.stamp 2>/dev/null || true)" != "$stamp" ]; then
    echo "test-mori: making $venv with $("$python" -V)"
    rm -rf $venv
    "$python" -m venv $venv
    $venv/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt setuptools ||
        fail "pip could not install setuptools: see the lines above"
    $venv/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt -e . pytest pytest-timeout ||
        fail "pip could not install kvbaton: see the lines above"
    echo "import site; site.addsitedir('$site')" >"$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
    echo "$stamp" >$venv/.stamp
fi
$venv/bin/python -m pytest -q -rs tests/transport/fabric/test_mori.py tests/transport/fabric/test_mori_fake.py "$@"
# Whole hand-overs by managers, over this transport alone.
KVBATON_TEST_TRANSPORTS=mori $venv/bin/python -m pytest -q -rs -k mori \
    tests/runtime/test_handover.py tests/runtime/test_kinds.py tests/runtime/test_aborts.py tests/runtime/test_closing.py
