"""``python -m kvbaton.doctor.gpu_access``: which GPUs can address each other's memory, as torch says.

A process of its own: torch takes seconds and memory of each GPU. Prints a JSON list of lists.
"""

from __future__ import annotations

import json
import sys


def peer_access() -> list[list[bool]]:
    """Row i, column j: whether GPU i can address the memory of GPU j. Raises ``ImportError`` without torch."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    numbers = range(count)
    return [[one == other or torch.cuda.can_device_access_peer(one, other) for other in numbers] for one in numbers]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(peer_access()) + "\n")
