#!/usr/bin/env bash
# Runs the tests that need RDMA in a virtual machine with soft-RoCE devices, made by the tool in RDMA_VM (a folder).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ ! -x "${RDMA_VM:-}/rdma-vm" ]; then
    echo "test-rdma: skipped, ${RDMA_VM:-RDMA_VM (which is not set)} has no rdma-vm; name its folder: make test-rdma RDMA_VM=folder"
    exit 0
fi
tests=(tests/transport/fabric/test_*_rdma.py)
status=0
for test in "${tests[@]}"; do
    echo "test-rdma: $test"
    "$RDMA_VM/rdma-vm" --venv "${VENV:-.venv}" --project . --timeout "${RDMA_TIMEOUT:-1500}" -e PYTHONPATH=src -- \
        python -m pytest -v --timeout=600 -p no:cacheprovider "$test" "$@" || status=$?
done
exit $status
