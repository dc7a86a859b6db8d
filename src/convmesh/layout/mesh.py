"""The ranks as a grid with named axes: a value, without processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property, partial

from convmesh.errors import MeshError

AXES = ("pipe", "data", "depth", "height", "width", "channel", "filter")
"""Axis names, outermost first: the axes with the heaviest traffic vary fastest, so their ranks are closest together."""

SPACE_AXES = ("depth", "height", "width")
"""The axes that cut space, each the dim of its name."""

CHANNEL_AXES = ("channel", "filter")
"""The axes that cut channels, outermost first."""

SHARED_AXES = ("data", *SPACE_AXES)
"""The axes whose ranks may have uneven shares of the work: those that cut samples and space."""


INSIDE, ACROSS = "%", "/"
"""Signs of the parts of an axis whose ranks lie in runs: `data%2` is along a run of 2, `data/2` from run to run."""


class Mesh:
    """`Mesh(data=2, depth=2, height=2)`: 8 ranks; axes that are not named have size 1.

    Ranks have equal shares of the work unless `with_shares` says otherwise.
    """

    def __init__(self, **axes: int) -> None:
        for name, size in axes.items():
            _check_axis(name, size)
        self.axes: dict[str, int] = {name: axes[name] for name in AXES if axes.get(name, 1) > 1}
        self.shares: dict[str, tuple[int, ...]] = {}
        """By axis: what its ranks have of samples or space, as ratios. Axes that are not named are cut evenly."""
        self._set_key()

    def _set_key(self) -> None:
        self._key = tuple(self.axes.items()), tuple(self.shares.items())
        self._hash = hash(self._key)

    def with_shares(self, **shares: Sequence[int]) -> Mesh:
        """The same ranks with other shares: `Mesh(data=2).with_shares(data=(3, 1))` deals 3 of 4 samples to the first.

        Equal shares cut evenly again; axes that are not named stay as they are.
        """
        if not shares:
            return self
        for name, parts in shares.items():
            _check_shares(name, parts, self._size(name))
        changed = {**self.shares, **{name: _lowest(parts) for name, parts in shares.items()}}
        mesh = Mesh(**self.axes)
        mesh.shares = {name: changed[name] for name in AXES if name in changed and len({*changed[name]}) > 1}
        mesh._set_key()
        return mesh

    @cached_property
    def even(self) -> Mesh:
        """The same ranks with equal shares."""
        return Mesh(**self.axes) if self.shares else self

    def weights(self, axes: Iterable[str]) -> tuple[int, ...] | None:
        """The shares of the parts along several axes taken as one, the first varying slowest; None if all are equal."""
        names = tuple(axes)
        if not any(name in self.shares for name in names):
            return None
        each = [self.shares.get(name, (1,) * self._size(name)) for name in names]
        return tuple(math.prod(parts) for parts in itertools.product(*each))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        """As written in code."""
        grid = f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes.items())})"
        shares = ", ".join(f"{name}={parts}" for name, parts in self.shares.items())
        return f"{grid}.with_shares({shares})" if shares else grid

    def __reduce__(self) -> tuple[partial[Mesh], tuple[()]]:
        """Rebuilt when unpickled: another process hashes names differently."""
        return partial(Mesh(**self.axes).with_shares, **self.shares) if self.shares else partial(Mesh, **self.axes), ()

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    def extent(self, axes: Iterable[str]) -> int:
        """The number of ranks in a group over `axes`, which may be parts of axes (see `runs`)."""
        return math.prod(self._size(name) for name in axes)

    def _size(self, name: str) -> int:
        return self.axes.get(name, 1) if name in AXES else self._stretch(name)[1]

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place on every axis."""
        place = {}
        for name, size in reversed(self.axes.items()):
            rank, place[name] = divmod(rank, size)
        return place

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank at a place."""
        rank = 0
        for name, size in self.axes.items():
            rank = rank * size + coordinates[name]
        return rank

    @cached_property
    def steps(self) -> dict[str, int]:
        """How far apart ranks are that are neighbours along each axis."""
        steps, step = {}, 1
        for name, size in reversed(self.axes.items()):
            steps[name], step = step, step * size
        return steps

    def part(self, axes: Iterable[str], coordinates: dict[str, int]) -> int:
        """The index of a place along several axes taken as one, the first varying slowest."""
        index = 0
        for name in axes:
            index = index * self.axes.get(name, 1) + coordinates.get(name, 0)
        return index

    def places(self, axes: Iterable[str], part: int) -> dict[str, int]:
        """The coordinates on `axes` of a part: the inverse of `part`."""
        coordinates = {}
        for name in reversed(tuple(axes)):
            part, place = divmod(part, self.axes.get(name, 1))
            if name in self.axes:
                coordinates[name] = place
        return coordinates

    def group(self, axes: Iterable[str], rank: int) -> list[int]:
        """The ranks that differ from `rank` on `axes` only, in order, `rank` among them."""
        stretches = self.stretches(axes)
        first = rank - sum(rank // step % extent * step for step, extent in stretches)
        ways = (range(0, step * extent, step) for step, extent in reversed(stretches))
        return [first + sum(steps) for steps in itertools.product(*ways)]

    def stretches(self, axes: Iterable[str]) -> list[tuple[int, int]]:
        """How far apart neighbours along each axis are, and how many there are; the closest first."""
        return sorted(stretch for name in set(axes) if (stretch := self._stretch(name))[1] > 1)

    def _stretch(self, name: str) -> tuple[int, int]:
        if name in AXES:
            return self.steps.get(name, 1), self.axes.get(name, 1)
        axis, sign, run = _in_parts(name)
        size = self.axes.get(axis, 1)
        if size % run:
            raise MeshError(f"`{name}`: runs of {run} ranks must divide the {size} along `{axis}`.")
        step = self.steps.get(axis, 1)
        return (step, run) if sign == INSIDE else (step * run, size // run)

    def runs(self, axes: Iterable[str], block: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The axes, or parts of them, along which ranks lie in one block of `block` ranks, and those across blocks.

        Of `data` in runs of 2, `data%2` is along a run, and `data/2` from run to run. None if consecutive blocks, from
        the first rank on, hold different parts of a group.
        """
        inside, across = [], []
        for name in (name for name in self.axes if name in {*axes}):
            size, run = self.axes[name], along(self.steps[name], self.axes[name], block)
            if run == 0:
                return None
            inside += [name] if run == size else [f"{name}{INSIDE}{run}"] if run > 1 else []
            across += [name] if run == 1 else [f"{name}{ACROSS}{run}"] if run < size else []
        return tuple(inside), tuple(across)


def along(step: int, extent: int, block: int | None) -> int:
    """How many of `extent` ranks, `step` apart, one aligned block of ranks holds (None: all); 0 if that varies."""
    if block is None or block % (step * extent) == 0:
        return extent
    if step % block == 0:
        return 1
    steps, rest = divmod(block, step)
    return steps if rest == 0 and extent % steps == 0 else 0


def whole_axis(name: str) -> str:
    """The axis that a name stands for, in whole or in part."""
    return name if name in AXES else _in_parts(name)[0]


def space_axes(dims: int) -> tuple[str, ...]:
    """The axes that cut `dims` dims of space: images have the last two."""
    return SPACE_AXES[max(0, len(SPACE_AXES) - max(0, dims)) :]


def _in_parts(name: str) -> tuple[str, str, int]:
    """The axis, which of its parts, and the ranks of a run, of a name such as `data%2`."""
    for sign in (INSIDE, ACROSS):
        axis, separator, run = name.partition(sign)
        if separator and axis in AXES and run.isdigit() and int(run):
            return axis, sign, int(run)
    raise MeshError(_unknown(name))


def _unknown(name: str) -> str:
    return f"`{name}` is not a mesh axis; the axes are {', '.join(AXES)}."


def _check_axis(name: str, size: int) -> None:
    if name not in AXES:
        raise MeshError(_unknown(name))
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise MeshError(f"`{name}` (={size!r}) must be a positive whole number of ranks; leave it out for 1.")


def _check_shares(name: str, parts: Sequence[int], ranks: int) -> None:
    if name not in SHARED_AXES:
        known = ", ".join(SHARED_AXES)
        raise MeshError(f"`{name}` (={parts!r}): only axes that cut samples or space have shares: {known}.")
    if len(parts) != ranks or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in parts):
        raise MeshError(
            f"`{name}` (={parts!r}) must be one positive whole number for each of the {ranks} ranks of the axis, "
            f"e.g. {(3, *(1,) * (ranks - 1))}."
        )


def _lowest(parts: Sequence[int]) -> tuple[int, ...]:
    """Ratios in lowest terms: equal ratios are equal values."""
    return tuple(n // math.gcd(*parts) for n in parts)
