"""A mesh without the axes that a call does not use, on which calls of different meshes and ranks are alike."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from functools import cache
from typing import Any

from convmesh.dist import OpenMesh, dry_mesh
from convmesh.layout import Layout, Mesh
from convmesh.lowering.dry_values import Dry, DryResult
from convmesh.plans import Step, Transfer, Wait
from convmesh.private_torch import tree_map


class MeshView:
    """One rank's mesh, reduced to some axes: `open` is what a call runs on."""

    def __init__(self, mesh: OpenMesh, axes: Set[str]) -> None:
        self._mesh = mesh.mesh
        self._here = mesh.mesh.coordinates(mesh.rank)
        kept = {name: extent for name, extent in mesh.mesh.axes.items() if name in axes}
        reduced = Mesh(**kept)
        rank = reduced.rank(self._here)
        self.open = dry_mesh(reduced, rank, mesh.stands_for).with_settings(mesh.settings)
        self.key = (reduced, rank, mesh.stands_for, mesh.settings)

    def inside(self, value: Dry) -> Dry:
        """A tensor of the whole mesh, on the reduced one."""
        return replace(value, layout=_moved(value.layout, self.open.mesh))

    def outside(self, result: DryResult) -> DryResult:
        """A result on the reduced mesh, on the whole one; steps that name no rank stay the same objects."""
        return replace(
            result,
            value=tree_map(self._value, result.value),
            forward=with_peers(result.forward, self._rank),
            backward=with_peers(result.backward, self._rank),
        )

    def _value(self, leaf: Any) -> Any:
        return replace(leaf, layout=_moved(leaf.layout, self._mesh)) if isinstance(leaf, Dry) else leaf

    def _rank(self, peer: int) -> int:
        """The rank of the whole mesh that stands where `peer` does on the reduced one."""
        return self._mesh.rank({**self._here, **self.open.mesh.coordinates(peer)})


@cache
def _moved(layout: Layout, mesh: Mesh) -> Layout:
    return layout if layout.mesh == mesh else Layout(mesh, layout.cuts)


def with_peers(steps: tuple[Step, ...], rank_of: Callable[[int], int]) -> tuple[Step, ...]:
    """Steps whose messages go to other ranks; the same tuple if none changes."""
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
