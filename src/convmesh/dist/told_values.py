"""Small values that ranks tell each other, as JSON: torch's own calls unpickle what arrives, which can run any code."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from convmesh.dist.lost_ranks import naming_lost_ranks
from convmesh.errors import DisagreementError

MOST_BYTES = 1 << 28
"""The largest value: more than any plan or list of checkpoints, less than a broken peer could make us allocate."""


def values_of_all(group: Any, size: int, value: Any) -> list[Any]:
    """The values of all `size` ranks of `group`, in the group's order; tuples arrive as lists."""
    if size == 1:
        return [json.loads(json.dumps(value))]
    with naming_lost_ranks():
        mine = _written(value, group)
        sizes = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()], device=mine.device), group=group)
        counts = [_checked(int(count)) for count in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=mine.device)
        padded[: mine.numel()] = mine
        texts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(texts, padded, group=group)
    return [_read(text[:count]) for text, count in zip(texts, counts, strict=True)]


def value_of(source: int, value: Any, group: Any = None) -> Any:
    """The value of the world's rank `source`, on every rank of `group`."""
    with naming_lost_ranks():
        mine = _written(value, group)
        count = torch.tensor([mine.numel()], device=mine.device)
        dist.broadcast(count, source, group=group)
        text = mine if dist.get_rank() == source else mine.new_empty(_checked(int(count)))
        dist.broadcast(text, source, group=group)
    return _read(text)


def _written(value: Any, group: Any) -> torch.Tensor:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _read(text: torch.Tensor) -> Any:
    return json.loads(bytes(text.tolist()))


def _checked(count: int) -> int:
    if not 0 < count <= MOST_BYTES:
        raise DisagreementError(f"another rank announced a value of {count} bytes; at most {MOST_BYTES} are read.")
    return count
