"""Stacking the caches of several requests for one decode step, and taking them apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvbaton.engines.hf.caches import CacheDescription, restore


def stack(description: CacheDescription, caches: Sequence[Any], lengths: Sequence[int]) -> Any:
    """One cache with all of ``caches`` along its batch axis; shorter ones are padded with zeros on the left.

    ``lengths`` are their tokens. They must be equal unless ``description.can_pad``.
    """
    stacked = description.new_cache()
    longest = max(lengths)
    for place in description.places:
        tensors = []
        for cache, length in zip(caches, lengths, strict=True):
            tensor = place.get(cache)
            if tensor is not None and place.token_axis > 0 and length < longest:
                shape = list(tensor.shape)
                shape[place.token_axis] = longest - length
                tensor = torch.cat([tensor.new_zeros(shape), tensor], dim=place.token_axis)
            tensors.append(tensor)
        present = [tensor for tensor in tensors if tensor is not None]
        place.set(stacked, torch.cat(present, dim=0) if present else None)
    restore(stacked, longest)
    return stacked


def unstack(description: CacheDescription, stacked: Any, lengths: Sequence[int]) -> list[Any]:
    """The caches that a stacked cache is made of, without their padding."""
    caches = []
    longest = max(lengths)
    for row, length in enumerate(lengths):
        cache = description.new_cache()
        for place in description.places:
            tensor = place.get(stacked)
            if tensor is not None:
                tensor = tensor[row : row + 1]
                if place.token_axis > 0 and length < longest:
                    tensor = tensor.narrow(place.token_axis, longest - length, length)
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            place.set(cache, tensor)
        restore(cache, length)
        caches.append(cache)
    return caches
