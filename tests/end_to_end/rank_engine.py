"""A process that holds some ranks of an engine, driven by JSON lines: one command in, one answer out.

It ends with its standard input, and so with the test that started it.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch

from kvbaton.engines.base import GenerateRequest, Sampling
from kvbaton.engines.hf import StoreExchange, make_model, open_engine

SECONDS = 60.0


class Driver:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = make_model("qwen3_5")
        self.engine = None
        self.handles = {}

    def open(self, *, role, tp, ranks, registry, transport, store, page_size):
        """Open an engine with some of its ``tp`` ranks; ``store`` is the port where decode processes meet."""
        options = {}
        if role == "decode":
            options["max_batch"] = 1
            if len(ranks) < tp:
                meeting = torch.distributed.TCPStore("127.0.0.1", store, timeout=timedelta(seconds=SECONDS))
                options["exchange"] = StoreExchange(meeting, ranks, tp)
        self.engine = open_engine(
            self.model,
            role=role,
            registry=registry,
            tp=tp,
            ranks=ranks,
            page_size=page_size,
            pool_tokens=512,
            max_running_requests=4,
            manager_options={"transports": [transport]},
            **options,
        )
        return [str(rank.shard.coords) for rank in self.engine.pools.ranks]

    def submit(self, *, room, ids, max_new_tokens):
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        self.handles[room] = self.engine.submit(GenerateRequest(f"request {room}", tuple(ids), room, sampling))

    def result(self, *, room):
        """Wait for the end of a request."""
        handle = self.handles.pop(room)
        tokens, end = handle.result(SECONDS)
        moved = {name: count for name, count in handle.bytes_by_component.items() if count}
        return {"tokens": tokens, "finish": end.finish, "error": end.error, "bytes": moved}

    def close(self):
        """Close the engine; the rows that are not free afterwards."""
        self.engine.close()
        return {name: count for name, count in self.engine.pools.free_rows().items() if count[0] < count[1]}


def main() -> None:
    driver = Driver()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(driver, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    main()
