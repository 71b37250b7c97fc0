#!/usr/bin/env bash
# Makes .venv with everything that the demo and the tests need. Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "setup: $1" >&2; exit 1; }

find_python() {
    local candidate
    local candidates=(python3.11 python3.12 python3.13 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# Debian splits what a compiler and venv need into packages of their own; as root they are installed, else named.
need_debian() {
    local package=$1 why=$2
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "setup: installing $package ($why)"
        { apt-get install -y -q "$package" || { apt-get update -q && apt-get install -y -q "$package"; }; } >/dev/null 2>&1 ||
            fail "$package is missing ($why) and apt-get could not install it"
    else
        fail "$package is missing ($why); install it, e.g.: sudo apt-get install $package"
    fi
}

python=$(find_python) || fail "${PYTHON:-Python 3.11, 3.12 or 3.13} is missing or of another version; install Python 3.11 to 3.13, or name one: make PYTHON=/path/to/python3.11 ..."
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import ensurepip, venv' 2>/dev/null || need_debian "python$version-venv" "virtual environments"
command -v "${CC:-gcc}" >/dev/null 2>&1 || need_debian gcc "the native copy kernel"
header=$("$python" -c 'import sysconfig, os; print(os.path.join(sysconfig.get_paths()["include"], "Python.h"))')
[ -e "$header" ] || need_debian "python$version-dev" "Python's headers, for the native copy kernel"

# A virtual environment cannot be moved: the folder is part of what makes it valid.
stamp=$({ pwd; "$python" -V; cat pyproject.toml constraints.txt setup.py src/kvbaton/copy/*.[ch]; } | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.stamp 2>/dev/null || true)" = "$stamp" ]; then exit 0; fi

echo "setup: making .venv with Python $version (some minutes the first time)"
if ! .venv/bin/python -c '' 2>/dev/null || [ "$(cat .venv/.folder 2>/dev/null || true)" != "$(pwd) $version" ]; then
    rm -rf .venv
    "$python" -m venv .venv
    echo "$(pwd) $version" >.venv/.folder
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
pip install -q -c constraints.txt setuptools || fail "pip could not install setuptools: see the lines above"
pip install -q -c constraints.txt -e ".[dev]" || fail "pip could not install the dependencies: see the lines above"
.venv/bin/python -c 'from kvbaton import copy; import sys; sys.exit(not copy.NATIVE)' ||
    echo "setup: the native copy kernel was not built; the slow numpy copy will be used (is a C compiler there?)" >&2
echo "$stamp" >.venv/.stamp
echo "setup: done"
