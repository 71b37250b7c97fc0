#!/usr/bin/env bash
# Runs the tests that need RDMA in a virtual machine with soft-RoCE devices, made by the tool in RDMA_VM (a folder).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ ! -x "${RDMA_VM:-}/rdma-vm" ]; then
    echo "test-rdma: skipped, ${RDMA_VM:-RDMA_VM (which is not set)} has no rdma-vm; name its folder: make test-rdma RDMA_VM=folder"
    exit 0
fi
status=0
for library in nixl mooncake; do
    echo "test-rdma: $library"
    # One library to a machine: each in a process of its own.
    "$RDMA_VM/rdma-vm" --venv "${VENV:-.venv}" --project . --timeout "${RDMA_TIMEOUT:-3600}" -e PYTHONPATH=src -- \
        python -m pytest -v --timeout=1800 -p no:cacheprovider -k "$library" \
        tests/transport/fabric/test_fabric_rdma.py "tests/transport/fabric/test_${library}_rdma.py" "$@" || status=$?
done
exit $status
