"""A copy of what a rank writes, in the host's memory, as the bytes of its file: training may go on at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convmesh.checkpoint.spreading import HeldTensor, Written, share_of
from convmesh.checkpoint.tensor_file import Stored, header_of, in_file_order, type_name
from convmesh.runtime.late_copy import LateCopy, Pair


@dataclass(frozen=True)
class Snapshot:
    """Everything that a file will hold; `data` has the tensors once their copies from a GPU have arrived."""

    stored: list[Stored]
    told: dict[str, Any]
    """What the file says about itself."""
    data: torch.Tensor
    arrival: torch.cuda.Event | None
    late: LateCopy
    """What is yet to be copied, before an optimiser's next update."""

    def chunks(self) -> list[bytes | memoryview]:
        """The file's bytes."""
        header = header_of(self.stored, {"convmesh": json.dumps(self.told)})
        if self.arrival is not None:
            self.arrival.synchronize()
        return [header, self.data.numpy().data]


class HostMemory:
    """Memory that is reused from one snapshot to the next: new pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int, pinned: bool) -> torch.Tensor:
        if self._bytes.numel() < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._bytes[:size]


@torch.no_grad()
def snapshot(rank: int, held: Sequence[HeldTensor], extra: dict[str, Any], memory: HostMemory) -> Snapshot:
    """This rank's share of the tensors, and what else its file says (`extra`)."""
    written = {each.key: each for each in share_of(rank, held)}
    stored = in_file_order([Stored(key, w.values.dtype, tuple(w.values.shape)) for key, w in written.items()])
    tensors = {each.name: [type_name(each.values.dtype), each.place.shape] for each in held}
    device = next((each.values.device for each in written.values() if each.values.is_cuda), None)
    data = memory.take(sum(each.bytes_size for each in stored), pinned=device is not None)
    late = LateCopy(_copy(stored, written, data))
    return Snapshot(stored, {"tensors": tensors, **extra}, data, None if device is None else _arrival(device), late)


def _copy(stored: Iterable[Stored], written: dict[str, Written], data: torch.Tensor) -> list[Pair]:
    """Copy values that may change at any time, and those on a GPU, whose copies do not block; return the rest."""
    begin, left = 0, []
    for each in stored:
        end = begin + each.bytes_size
        pair = data[begin:end].view(each.dtype).view(each.shape), written[each.key].values
        if written[each.key].is_steady and not pair[1].is_cuda:
            left.append(pair)
        else:
            pair[0].copy_(pair[1], non_blocking=True)
        begin = end
    return left


def _arrival(device: torch.device) -> torch.cuda.Event:
    # On training's stream: the next step's kernels change weights only after they have been copied.
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
