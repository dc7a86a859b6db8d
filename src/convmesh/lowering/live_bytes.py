"""Counting the bytes of live tensors: each storage once, from the operator that makes it until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from convmesh.ops.core.probe import Probe, is_probing
from convmesh.plans import Saved
from convmesh.private_torch.dispatching import FakeTensor, UncompiledDispatchMode
from convmesh.private_torch.dtensors import is_dtensor_type
from convmesh.private_torch.tensor_internals import memory_key, storage_key


class HeldStorages(UncompiledDispatchMode):
    """Counts bytes made by operators inside the block on one kind of device and still held; exact but for workspace."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._alive: dict[int, tuple[_Watch, int]] = {}
        self.bytes_held = 0
        self.bytes_peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_dtensor_type(kind) for kind in types):
            return NotImplemented  # it comes again, with the tensors inside
        result = func(*args, **(kwargs or {}))
        if Probe.is_made or is_probing(args):
            return result  # it has no memory in a run with data
        self.see(result if isinstance(result, (list, tuple)) else (result,))
        return result

    def see(self, values: Iterable[Any]) -> None:
        """Count the tensors that were not seen before."""
        for value in values:
            if type(value) is torch.Tensor and value.is_meta and self._device == "meta":  # nearly all of a dry run
                self._count(value.untyped_storage())
            elif isinstance(value, torch.Tensor):
                # Torch derives the shapes of DTensors with fake tensors; oneDNN's own kind of tensor has no storage.
                if value.device.type == self._device and not isinstance(value, FakeTensor) and not value.is_mkldnn:
                    self._count(value.untyped_storage())
            elif isinstance(value, (list, tuple)):
                self.see(value)
        self.bytes_peak = max(self.bytes_peak, self.bytes_held)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key not in self._alive:
            size = storage.nbytes()
            self._alive[key] = _Watch(storage, self._forget), size
            self._alive[key][0].key = key
            self.bytes_held += size

    def _forget(self, watch: _Watch) -> None:
        self.bytes_held -= self._alive.pop(watch.key)[1]

    def start(self, values: Iterable[Any] = ()) -> int:
        """Track the peak from here on, with `values` already held; returns the bytes held now."""
        self.see(values)
        self.bytes_peak = self.bytes_held
        return self.bytes_held


class HeldMoments(HeldStorages):
    """The same, also noting what is held after every operator."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._moments: dict[int, None] = {}

    def see(self, values: Iterable[Any]) -> None:
        super().see(values)
        self._moments[self.bytes_held] = None

    def start(self, values: Iterable[Any] = ()) -> int:
        before = super().start(values)
        self._moments = {before: None}
        return before

    def above(self, base: int) -> tuple[int, ...]:
        """The distinct byte counts held since the start, less `base`."""
        return tuple([held - base for held in self._moments])


class _Watch(weakref.ref[torch.UntypedStorage]):
    """Calls back when a storage is freed."""

    __slots__ = ("key",)
    key: int


Groups = Sequence[tuple[str, Sequence[torch.Tensor | None]]]


def owned(tensors: Sequence[torch.Tensor], groups: Groups) -> tuple[Saved, ...]:
    """For each tensor, the first member of the groups whose memory it is in: the group's name and the index there."""
    owners: dict[int, tuple[Any, int]] = {}
    for name, members in groups:
        for index, tensor in enumerate(members):
            if tensor is not None:
                owners.setdefault(memory_key(tensor), (name, index))
    return tuple(Saved(*owners[memory_key(t)], bytes_kept=t.untyped_storage().nbytes()) for t in tensors)


def owned_by(tensors: Sequence[torch.Tensor | None], groups: Groups) -> tuple[Saved | None, ...]:
    """The same for tensors of which some may be missing."""
    owners = iter(owned([t for t in tensors if t is not None], groups))
    return tuple(None if t is None else next(owners) for t in tensors)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their storages, each counted once."""
    return sum({memory_key(t): t.untyped_storage().nbytes() for t in tensors}.values())
