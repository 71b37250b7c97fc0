import time

import kvbaton as kb
from kvbaton.layout import paged_kv, required_bytes


def rank(role, registry):
    kv = paged_kv(layers=range(4), rows=64, page_size=16, heads=8, head_dim=64, dtype="float16")
    memory = kb.SharedMemory(required_bytes([kv])[0])
    return memory, kb.Manager(kb.RankLayout((kv,)), [kb.Region.of(memory)], role=role, registry=registry)


registry = kb.MemoryRegistry()  # between processes: the url of a kvbaton registry
source, prefill = rank("prefill", registry)
target, decode = rank("decode", registry)
source.array[:] = 7
with prefill, decode:
    receiver = decode.receiver(room=1)
    receiver.offer({"kv": [5, 9]}, tokens=30)  # 30 tokens go into pages 5 and 9
    sender = prefill.sender(room=1)
    sender.finish({"kv": [0, 1]}, tokens=(0, 30))  # ... and come from pages 0 and 1
    while not receiver.poll().terminal:
        time.sleep(0.001)
    receiver.raise_for_failure()
    print(receiver.bytes_by_component, int(target.array.sum()) // 7, "bytes are there")
