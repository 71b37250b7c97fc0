#!/usr/bin/env bash
# Puts NIXL and Mooncake into .venv, for the transports of these names. Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup-fabrics: $1" >&2; }
# shellcheck source=scripts/vendor.sh
source scripts/vendor.sh

stamp=$({ cat scripts/fabrics.sh scripts/vendor.sh; fabric_versions; } | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.fabrics 2>/dev/null || true)" = "$stamp" ]; then exit 0; fi
say "installing ${FABRIC_WHEELS[*]} into .venv (150 MB)"
install_fabric_wheels .venv/bin/python || true
install_fabric_debian || true

absent=0
for module in nixl_cu13 mooncake.engine; do
    if reason=$(.venv/bin/python -c "import $module" 2>&1); then
        say "$module is ready"
    else
        say "$module cannot be used: $(tail -n 1 <<<"$reason")"
        absent=1
    fi
done
[ $absent = 0 ] || exit 1
echo "$stamp" >.venv/.fabrics
