"""Class labels outside the classes: found on one rank, raised on every rank.

An error on the rank that finds one would leave the others waiting. So the wrong label is replaced and the loss becomes
NaN, which the sum over ranks carries to all of them; then all ask together whose label it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from convmesh.dist import OpenMesh, all_reduce
from convmesh.dist.agreement import problems_of
from convmesh.errors import LabelError
from convmesh.layout import Layout
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.loss.nan_flag import NanFlag, can_be_read
from convmesh.private_torch.tracing import is_traced


@dataclass(frozen=True)
class LabelNote:
    """What a loss saw of this rank's labels: the lowest and highest wrong ones; 0 and 0 if there are none."""

    lowest: torch.Tensor
    highest: torch.Tensor
    classes: int
    ignore_index: int | None

    def problem(self) -> str | None:
        """What is wrong, or None. Waits for the device."""
        value = int(self.lowest) or int(self.highest)
        if not value:
            return None
        ignored = "" if self.ignore_index is None else f", or ignore_index (={self.ignore_index})"
        return f"label {value}; labels of {self.classes} classes must be from 0 to {self.classes - 1}{ignored}"


Notes = list[LabelNote]

_collected: ContextVar[Notes | None] = ContextVar("collected", default=None)
_pending: weakref.WeakKeyDictionary[OpenMesh, tuple[NanFlag, Notes]] = weakref.WeakKeyDictionary()
"""By mesh: the last loss computed on a GPU outside a network."""


@contextmanager
def collecting_labels() -> Iterator[Notes]:
    """Leave the check to the caller: `raise_wrong_labels` with these notes, once every rank has the loss."""
    notes: Notes = []
    token = _collected.set(notes)
    try:
        yield notes
    finally:
        _collected.reset(token)


def note_labels(notes: Notes) -> None:
    """Add to the notes being collected, if any are."""
    collected = _collected.get()
    if collected is not None:
        collected += notes


def checked_labels(
    labels: torch.Tensor, classes: int, ignore_index: int | None
) -> tuple[torch.Tensor, torch.Tensor | None, LabelNote | None]:
    """The labels with wrong ones replaced, NaN or 0 to add to the losses, and a note; None for both if all are right.

    On a GPU, and in a trace, no value is read, so there is always something to add.
    """
    if labels.is_meta or not labels.numel():
        return labels, None, None
    is_readable = labels.is_cpu and not is_traced()
    if is_readable and _are_within(*labels.aminmax(), classes):
        return labels, None, None
    replaced, poison, note = replaced_labels(labels, classes, ignore_index)
    if is_readable and note.problem() is None:
        return labels, None, None
    return replaced, poison, note


def replaced_labels(
    labels: torch.Tensor, classes: int, ignore_index: int | None
) -> tuple[torch.Tensor, torch.Tensor, LabelNote]:
    """The same without reading any value: 0 for wrong labels, and NaN or 0 to add."""
    outside = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        outside &= labels != ignore_index
    wrong = labels.where(outside, 0)
    note = LabelNote(*wrong.aminmax(), classes, ignore_index)
    is_wrong = (note.lowest != 0) | (note.highest != 0)
    return labels - wrong, torch.where(is_wrong, torch.nan, 0.0), note


def _are_within(lowest: torch.Tensor, highest: torch.Tensor, classes: int) -> bool:
    return int(lowest) >= 0 and int(highest) < classes


def for_replicas(
    poison: torch.Tensor | None, like: torch.Tensor, layout: Layout, mesh: OpenMesh
) -> torch.Tensor | None:
    """NaN on every rank that computes the same losses if any of them has it: each is given its own labels."""
    axes = tuple(axis for axis in mesh.mesh.axes if axis not in layout.axes and axis != "pipe")
    if mesh.mesh.extent(axes) == 1:
        return poison
    here = torch.zeros((), dtype=torch.float32, device=like.device) if poison is None else poison.float()
    return all_reduce(here, mesh, axes)


def settle_labels(loss: Sharded, note: LabelNote | None) -> None:
    """Raise on every rank if a wrong label made the loss NaN; in a network, leave that to the network.

    Losses that are not reduced keep their NaN: ranks do not know each other's yet.
    """
    value, mesh, notes = loss.local, loss.mesh, [] if note is None else [note]
    collected = _collected.get()
    if collected is not None:
        collected += notes
    elif mesh.is_dry or loss.dim() or not can_be_read(value):
        return
    elif not value.is_cuda:
        _settle(NanFlag(value), notes, mesh)
    else:
        last = _pending.pop(mesh, None)
        _pending[mesh] = NanFlag(value), notes
        if last is not None:
            _settle(*last, mesh)


def _settle(is_nan: NanFlag, notes: Notes, mesh: OpenMesh) -> None:
    if is_nan:
        raise_wrong_labels(notes, mesh, tuple(axis for axis in mesh.mesh.axes if axis != "pipe"))


def raise_wrong_labels(notes: Sequence[LabelNote], mesh: OpenMesh, axes: tuple[str, ...]) -> None:
    """Raise if any rank along `axes` noted a wrong label. Collective: all of them call it, since all have NaN."""
    here = next((problem for note in notes if (problem := note.problem())), None)
    told = None if here is None else f"rank {mesh.rank} has {here}"
    size = mesh.mesh.extent(axes)
    everywhere = problems_of(mesh.group(axes), size, told) if size > 1 else [told] if told else []
    if everywhere:
        raise LabelError(f"`target` has labels that are no class: {'; '.join(everywhere)}.")


def raise_here(note: LabelNote | None) -> None:
    """The same for plain tensors, in a single process."""
    if note is not None and not note.lowest.is_cuda and (problem := note.problem()):
        raise LabelError(f"`target` has {problem}.")
