"""Dry runs for any extent of one dim, derived from one with an extent too large to mistake for another number.

In a call that treats samples or channels one by one, every extent, stride and byte count is a multiple of their number
plus a constant. A run for `MANY` of them shows both, because constants are far smaller. The largest of several counts
is no such number, so a result lists the bytes held at every moment, and the peak is taken at the end.

A gradient may arrive as part of a larger tensor, with a gap after each sample. The call copies it, or reads it in
place; the width of the gap changes nothing but the strides that are recorded, so one run, for `APART`, serves gaps of
any width.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from convmesh.dist import OpenMesh
from convmesh.dist.traffic import all_reduce_bytes
from convmesh.layout import Layout, Mesh
from convmesh.layout.layout import LAYOUTS_KEPT, Cut
from convmesh.layout.partition import Partition
from convmesh.lowering.dry_values import Dry, DryResult, mapped
from convmesh.plans import Held, Saved, Step, Transfer, Wait, Work

MANY = 4_294_967_311
"""The first prime above 2^32; with 2^25 elements a sample, torch's byte counts still fit in 64 bits."""

MOST_ELEMENTS = 1 << 25
"""Most elements of this rank's part of one sample or channel, in any argument of a call."""

MOST_BYTES = 1 << 28
"""Most bytes of a call's weight: sums of a few of these stay far below half of `MANY`."""

APART = 268_435_399
"""Elements from one sample to the next in gradients with gaps: the last prime below 2^28."""

_HALF, _DIGITS = MANY // 2, str(MANY)
_LONG = re.compile(r"(?<![\w.])\d{9,}(?![\w.])")


def counts_alone(mesh: OpenMesh) -> bool:
    """Whether calls on a mesh do the same for each sample and channel, regardless of their number.

    Not on CPUs, whose kernels are chosen by size, nor in compiled steps, where size decides whether to wait for halos.
    """
    return mesh.stands_for == "cuda" and not mesh.settings.compile


class Extent(NamedTuple):
    """What to read a result for: the extent of the dim that is `MANY`, and the stride that `APART` stands for."""

    dim: int
    extent: int
    apart: int = APART


def has_gaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether there are gaps between a tensor's samples, each of which is in one piece."""
    inside = sum((extent - 1) * stride for extent, stride in zip(shape[1:], strides[1:], strict=True))
    return strides[0] > inside + 1


def uncut(extent: int) -> Cut:
    """The cut of a dim that no axis cuts."""
    return Cut((), Partition.even(extent, 1))


def for_extent(result: DryResult, wanted: Extent, mesh: Mesh) -> DryResult:
    """The result of a dry run for `MANY` on `mesh`, read for another extent; ValueError if that is impossible."""
    at = _Counted(wanted, mesh)
    forward, backward = (tuple([at.step(step) for step in steps]) for steps in (result.forward, result.backward))
    if wanted.apart != APART and _counts_gaps(result):
        raise ValueError("gaps are counted")
    moments = tuple(tuple(map(at.number, held)) for held in result.moments)
    bytes_forward, bytes_backward, bytes_weights = map(max, moments)
    held = Held(
        bytes_forward,
        bytes_backward,
        bytes_weights,
        outputs=tuple(map(at.saved, result.held.outputs)),
        gradients=tuple(None if one is None else at.saved(one) for one in result.held.gradients),
    )
    return replace(
        result,
        value=mapped(at.value, result.value),
        forward=forward,
        backward=backward,
        saved=tuple(map(at.saved, result.saved)),
        held=held,
        gradients=tuple(None if strides is None else at.shape(strides) for strides in result.gradients),
        moments=moments,
        counted_from=result,
    )


def _counts_gaps(result: DryResult) -> bool:
    """Whether the memory that is held includes gaps."""
    owned = (*result.saved, *result.held.outputs, *(one for one in result.held.gradients if one is not None))
    sizes = (*(one.bytes_kept for one in owned), *(size for moments in result.moments for size in moments))
    return max(sizes, default=0) >= MANY * APART


class _Counted:
    """Reads numbers found for `MANY` as those for another extent."""

    def __init__(self, wanted: Extent, mesh: Mesh) -> None:
        self._dim, self._extent, self._apart = wanted
        self._mesh = mesh

    def number(self, found: int) -> int:
        if -_HALF < found < _HALF:
            return found
        times, rest = divmod(found + _HALF, MANY)
        return times * self._extent + rest - _HALF

    def shape(self, found: tuple[int, ...]) -> tuple[int, ...]:
        """A shape, or strides."""
        return tuple([self._stride(extent) if extent >= APART else extent for extent in found])

    def _stride(self, found: int) -> int:
        return self._apart if found == APART else self.number(found)

    def saved(self, found: Saved) -> Saved:
        return Saved(found.what, found.index, self.number(found.bytes_kept))

    def value(self, leaf: Any) -> Any:
        if not isinstance(leaf, Dry) or leaf.layout.shape[self._dim] < _HALF:
            return leaf
        if leaf.layout.cuts[self._dim].axes:
            raise ValueError("the extent was cut")
        return leaf.lying_in(_with_extent(leaf.layout, self._dim, self.number(leaf.layout.shape[self._dim])))

    def step(self, found: Step) -> Step:
        if isinstance(found, Transfer):
            return Transfer(found.carrier, found.axes, self._sent(found), found.peer)
        if isinstance(found, Wait):
            return Wait(found.transfers, tuple([(peer, self.number(size)) for peer, size in found.arriving]))
        if found.bytes_moved < _HALF and not _LONG.search(found.call):  # on weights alone, or other channels
            return found
        call = _LONG.sub(lambda digits: str(self._stride(int(digits[0]))), found.call)
        if _DIGITS in call:
            raise ValueError("the extent is part of another number")
        return Work(
            op=found.op,
            inputs=tuple([self.shape(shape) for shape in found.inputs]),
            outputs=tuple([self.shape(shape) for shape in found.outputs]),
            dtype=found.dtype,
            flops=self.number(found.flops),
            bytes_moved=self.number(found.bytes_moved),
            options=tuple([self._option(option) for option in found.options]),
            call=call,
        )

    def _sent(self, found: Transfer) -> int:
        """Bytes sent. A share that was rounded cannot be read for another extent, except that of an all-reduce."""
        size = found.bytes_sent
        if size < _HALF:
            return size
        if found.carrier == "all_reduce":
            ranks = self._mesh.extent(found.axes)
            return all_reduce_bytes(self.number(_summed(size, ranks)), 1, ranks)
        if size % MANY:
            raise ValueError("bytes were rounded")
        return self.number(size)

    def _option(self, found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple([self._option(part) for part in found])
        return self.number(found) if type(found) is int else found


@lru_cache(maxsize=LAYOUTS_KEPT)
def _with_extent(layout: Layout, dim: int, extent: int) -> Layout:
    return layout.replacing({dim: uncut(extent)})


def _summed(sent: int, ranks: int) -> int:
    """The bytes that an all-reduce sums if it sends `sent`; it sends at least what it sums, so the answer is unique."""
    summed = -(-sent * ranks // (2 * (ranks - 1)))
    assert all_reduce_bytes(summed, 1, ranks) == sent
    return summed
