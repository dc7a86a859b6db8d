"""A mesh without the axes that a call does not use, on which calls of different meshes and ranks are alike."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from convmesh.dist import OpenMesh, dry_mesh
from convmesh.layout import Mesh
from convmesh.lowering.axis_names import AxisNames, layout_on
from convmesh.lowering.dry_values import Dry, DryResult, mapped
from convmesh.plans import Step, Transfer, Wait, Work


class MeshView:
    """One rank's mesh, reduced to some axes under names that meshes share: `open` is what a call runs on."""

    def __init__(self, mesh: OpenMesh, axes: Set[str]) -> None:
        self.names = AxisNames.shared(axes)
        self._back = self.names.back
        self._mesh = mesh.mesh
        self._here = mesh.mesh.coordinates(mesh.rank)
        kept = tuple(name for name in mesh.mesh.axes if name in axes)
        inside = self.names.axes(kept)
        uneven = {name: parts for name, parts in mesh.mesh.shares.items() if name in kept}
        sizes = {new: mesh.mesh.axes[old] for old, new in zip(kept, inside, strict=True)}
        reduced = Mesh(**sizes).with_shares(**uneven)
        rank = reduced.rank({new: self._here[old] for old, new in zip(kept, inside, strict=True)})
        self.open = dry_mesh(reduced, rank, mesh.stands_for).with_settings(mesh.settings)
        self.key = (reduced, mesh.stands_for, mesh.settings)
        self._is_whole = reduced == mesh.mesh

    def inside(self, value: Dry) -> Dry:
        """A tensor of the whole mesh, on the reduced one."""
        return value.lying_in(layout_on(value.layout, self.open.mesh, self.names))

    def outside(self, result: DryResult) -> DryResult:
        """A result on the reduced mesh, on the whole one; steps that name no rank and no axis stay the same objects."""
        if self._is_whole:
            return result
        return replace(
            result,
            value=mapped(self._value, result.value),
            forward=self._steps(result.forward),
            backward=self._steps(result.backward),
            sum_axes=tuple(self._back.axes(axes) for axes in result.sum_axes),
            decided=self._back.weight_split(result.decided),
        )

    def _value(self, leaf: Any) -> Any:
        return leaf.lying_in(layout_on(leaf.layout, self._mesh, self._back)) if isinstance(leaf, Dry) else leaf

    def _steps(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        if all(step.__class__ is Work for step in steps):
            return steps
        if self._back.pairs:
            steps = tuple(replace(s, axes=self._back.axes(s.axes)) if isinstance(s, Transfer) else s for s in steps)
        return with_peers(steps, self._rank)

    def _rank(self, peer: int) -> int:
        """The rank of the whole mesh at the place of `peer` on the reduced one."""
        place = self.open.mesh.coordinates(peer)
        table = dict(self._back.pairs)
        return self._mesh.rank({**self._here, **{table.get(name, name): at for name, at in place.items()}})


def with_peers(steps: tuple[Step, ...], rank_of: Callable[[int], int]) -> tuple[Step, ...]:
    """Steps with their peers renumbered by `rank_of`; the same tuple if none changes."""
    moved = tuple(_with_peer(step, rank_of) for step in steps)
    return steps if all(a is b for a, b in zip(moved, steps, strict=True)) else moved


def _with_peer(step: Step, rank_of: Callable[[int], int]) -> Step:
    if isinstance(step, Transfer) and step.peer is not None:
        peer = rank_of(step.peer)
        return step if peer == step.peer else replace(step, peer=peer)
    if isinstance(step, Wait) and step.arriving:
        arriving = tuple((rank_of(peer), size) for peer, size in step.arriving)
        return step if arriving == step.arriving else replace(step, arriving=arriving)
    return step
