"""Dry runs for any number of samples, from one for a number that can be told from all others.

In a call that treats samples one by one, every extent, stride and count of bytes is a multiple of the number of samples
plus a constant. Run for `MANY` samples, both can be read off: constants are far smaller. The largest of several counts
is no such number, so that a result lists the bytes held at every moment, of which the peak is chosen at the end.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from convmesh.layout.layout import Cut
from convmesh.layout.partition import Partition
from convmesh.lowering.dry_values import Dry, DryResult, mapped
from convmesh.plans import Held, Saved, Step, Transfer, Wait, Work

MANY = 4_294_967_311
"""The first prime above 2^32: with it torch still counts the bytes of 2^25 elements a sample in 64 bits."""

MOST_ELEMENTS = 1 << 24
"""Of a sample, in any argument of a call."""

MOST_BYTES = 1 << 28
"""Of a call's weight: sums of a few of these stay far below half of `MANY`."""

_HALF, _DIGITS = MANY // 2, str(MANY)
_LONG = re.compile(r"(?<![\w.])\d{10,}(?![\w.])")


def whole_batch(samples: int) -> Cut:
    """The cut of a batch of which one rank has all."""
    return Cut((), Partition.even(samples, 1))


def for_samples(result: DryResult, samples: int) -> DryResult:
    """What a dry run for `MANY` samples would have been for `samples`; ValueError if that cannot be told."""
    at = _Counted(samples)
    forward, backward = (tuple([at.step(step) for step in steps]) for steps in (result.forward, result.backward))
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


class _Counted:
    """Reads numbers found for `MANY` samples as those for another number of them."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._cut = whole_batch(samples)

    def number(self, found: int) -> int:
        if -_HALF < found < _HALF:
            return found
        times, rest = divmod(found + _HALF, MANY)
        return times * self._samples + rest - _HALF

    def shape(self, found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([extent if extent < _HALF else self.number(extent) for extent in found])

    def saved(self, found: Saved) -> Saved:
        return Saved(found.what, found.index, self.number(found.bytes_kept))

    def value(self, leaf: Any) -> Any:
        return leaf.lying_in(leaf.layout.replacing({0: self._cut})) if isinstance(leaf, Dry) else leaf

    def step(self, found: Step) -> Step:
        if isinstance(found, Transfer):
            return Transfer(found.carrier, found.axes, self._sent(found.bytes_sent), found.peer)
        if isinstance(found, Wait):
            return Wait(found.transfers, tuple([(peer, self.number(size)) for peer, size in found.arriving]))
        if found.bytes_moved < _HALF:  # on weights alone
            return found
        call = _LONG.sub(lambda digits: str(self.number(int(digits[0]))), found.call)
        if _DIGITS in call:
            raise ValueError("the number of samples is part of another number")
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

    def _sent(self, found: int) -> int:
        """Of samples or of weights; a share that was rounded is no such number."""
        if found >= _HALF and found % MANY:
            raise ValueError("bytes were rounded")
        return self.number(found)

    def _option(self, found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple([self._option(part) for part in found])
        return self.number(found) if type(found) is int else found
