"""Which axes cut which dims of one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from convmesh.errors import LayoutError
from convmesh.layout.box import Box
from convmesh.layout.mesh import AXES, CHANNEL_AXES, Mesh
from convmesh.layout.partition import Partition

LAYOUTS_KEPT = 1 << 13
"""Results that each function of layouts caches: shares that move bring new layouts for as long as a run lasts."""


class Cut(NamedTuple):
    """One dim: the axes that cut it (none: every rank holds all of it) and where."""

    axes: tuple[str, ...]
    partition: Partition


def fair_cut(mesh: Mesh, extent: int, axes: tuple[str, ...]) -> Cut:
    """A dim cut by the shares of its axes, which are equal unless the mesh says otherwise.

    This is the one place that knows shares: where a rank's part begins depends on nothing but the mesh and the extent.
    """
    if axes and {*axes} <= {*CHANNEL_AXES}:
        return chunked_cut(mesh, extent, axes)
    weights = mesh.weights(axes) if mesh.shares else None
    parts = mesh.extent(axes)
    return Cut(axes, Partition.even(extent, parts) if weights is None else Partition.weighted(extent, weights))


def chunked_cut(mesh: Mesh, extent: int, axes: tuple[str, ...]) -> Cut:
    """A dim cut axis by axis, as DTensor cuts weights: channels and filters, whatever axes cut them."""
    return Cut(axes, Partition.nested(extent, [mesh.axes[name] for name in axes]))


class Layout:
    """Where every index of one global tensor lives.

    An axis that cuts no dim replicates the tensor: the ranks along it hold equal copies, and equal gradients.
    """

    folds = False
    """Whether the tensor has the last two dims as one; see `FoldedLayout`."""
    copies = False
    """Whether the last dim counts copies of the tensor; see `CopiedLayout`."""

    def __init__(self, mesh: Mesh, cuts: Sequence[Cut]) -> None:
        self.mesh = mesh
        self.cuts = tuple(cuts)
        self._check()
        self._hash = hash((mesh, self.cuts, self.folds, self.copies))
        self._last: tuple[int, Box] = -1, Box(())

    @classmethod
    def of(cls, mesh: Mesh, shape: Sequence[int], cut: Mapping[int, str | Sequence[str]] | None = None) -> Layout:
        """`shape` cut by the mesh's shares; `cut` maps dims to their axes: `{0: "data", 2: ("depth", "height")}`.

        Dims cut by channel axes are cut axis by axis, as DTensor cuts weights, so that weights and activations agree.
        """
        axes_of: list[tuple[str, ...]] = [()] * len(shape)
        for dim, names in (cut or {}).items():
            if not -len(shape) <= dim < len(shape):
                raise LayoutError(f"`cut` names dim {dim}, but the tensor has {len(shape)} dims: {tuple(shape)}.")
            if axes_of[dim]:
                raise LayoutError(f"`cut` (={dict(cut or {})}) names dim {dim} twice; give all its axes at once.")
            axes_of[dim] = (names,) if isinstance(names, str) else tuple(names)
        _check_names(axes_of)
        used = [tuple(name for name in axes if name in mesh.axes) for axes in axes_of]
        return cls(mesh, [fair_cut(mesh, n, axes) for n, axes in zip(shape, used, strict=True)])

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Layout)
            and self._hash == other._hash
            and (self.folds, self.copies) == (other.folds, other.copies)
            and self.mesh == other.mesh
            and self.cuts == other.cuts
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[Mesh, tuple[Cut, ...]]]:
        """Rebuilt when unpickled: another process hashes names differently."""
        return type(self), (self.mesh, self.cuts)

    def __repr__(self) -> str:
        cuts = ", ".join(f"{dim}: {'*'.join(cut.axes)}" for dim, cut in enumerate(self.cuts) if cut.axes)
        return f"Layout({self.mesh}, {self.shape}, {{{cuts}}})"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(cut.partition.extent for cut in self.cuts)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut some dim, in mesh order."""
        used = {name for cut in self.cuts for name in cut.axes}
        return tuple(name for name in self.mesh.axes if name in used)

    @cached_property
    def has_whole_samples(self) -> bool:
        """Whether no dim but the first is cut, if any is."""
        return bool(self.cuts) and not self.folds and not any(cut.axes for cut in self.cuts[1:])

    def axes_of(self, dims: Sequence[int]) -> tuple[str, ...]:
        """The axes that cut any of `dims`, in mesh order."""
        if not self.axes:
            return ()
        used = {name for dim in dims for name in self.cuts[dim].axes}
        return tuple(name for name in self.mesh.axes if name in used)

    def is_cut(self, dim: int) -> bool:
        return bool(self.cuts[dim].axes)

    def box(self, rank: int) -> Box:
        """The box that `rank` holds; the last is kept, since most are asked for by one rank only."""
        last = self._last
        if last[0] != rank:
            here = self.mesh.coordinates(rank)
            last = self._last = rank, Box(tuple([p.span(self.mesh.part(axes, here)) for axes, p in self.cuts]))
        return last[1]

    def with_shape(self, shape: Sequence[int]) -> Layout:
        """The same axes on the same dims of a tensor of another shape."""
        if tuple(shape) == self.shape:
            return self
        return type(self)(self.mesh, [self._rescaled(cut, n) for cut, n in zip(self.cuts, shape, strict=True)])

    def _rescaled(self, cut: Cut, extent: int) -> Cut:
        """A cut by the mesh's shares stays one; any other uneven cut keeps its own shares."""
        if extent == cut.partition.extent:
            return cut
        if cut == fair_cut(self.mesh, cut.partition.extent, cut.axes):
            return fair_cut(self.mesh, extent, cut.axes)
        if cut == chunked_cut(self.mesh, cut.partition.extent, cut.axes):
            return chunked_cut(self.mesh, extent, cut.axes)
        return Cut(cut.axes, cut.partition.rescale(extent))

    def replacing(self, cuts: Mapping[int, Cut]) -> Layout:
        """This layout with some dims cut differently."""
        return type(self)(self.mesh, [cuts.get(dim, cut) for dim, cut in enumerate(self.cuts)])

    def with_whole(self, dims: Sequence[int]) -> Layout:
        """This layout with `dims` no longer cut: their axes replicate."""
        return self.replacing({d: Cut((), Partition.even(self.shape[d], 1)) for d in dims})

    def _check(self) -> None:
        _check_names([cut.axes for cut in self.cuts])
        for dim, (axes, partition) in enumerate(self.cuts):
            for name in axes:
                if name not in self.mesh.axes:
                    known = ", ".join(self.mesh.axes) or "none"
                    raise LayoutError(f"dim {dim} is cut by axis {name!r}, but {self.mesh} has only {known}.")
            if partition.parts != self.mesh.extent(axes):
                raise LayoutError(
                    f"dim {dim} has {partition.parts} parts, but its axes {axes} of {self.mesh} "
                    f"have {self.mesh.extent(axes)} ranks; give it that many parts."
                )


class FoldedLayout(Layout):
    """The layout of a tensor whose last dim is several blocks one after the other, each of them cut in the same way.

    A fused projection to queries, keys and values is one: three blocks, of which every rank has the same heads. Cuts
    and shape are those of the tensor with the blocks in a dim of their own.
    """

    folds = True

    @cached_property
    def unfolded(self) -> Layout:
        """The layout of the tensor with the blocks in a dim of their own."""
        return Layout(self.mesh, self.cuts)


class CopiedLayout(Layout):
    """The layout of copies of a tensor, numbered by a last dim that is cut into single ones.

    Ranks along the axes of that dim have one each. Unlike replicas, whose gradients are equal, each copy has its own.
    """

    copies = True

    @cached_property
    def single(self) -> Layout:
        """The layout of one copy."""
        return Layout(self.mesh, self.cuts[:-1])


def _check_names(axes_of: Sequence[tuple[str, ...]]) -> None:
    names = [name for axes in axes_of for name in axes]
    for name in names:
        if name not in AXES:
            raise LayoutError(f"`cut` names axis {name!r}, which is not a mesh axis; the axes are {', '.join(AXES)}.")
        if names.count(name) > 1:
            raise LayoutError(f"`cut` names axis {name!r} twice; one axis cuts one dim of a tensor.")
