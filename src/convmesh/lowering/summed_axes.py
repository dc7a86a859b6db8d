"""The axes along which gradients are summed, named so that sums over equally many ranks are alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from convmesh.dist import OpenMesh, dry_mesh
from convmesh.dist.flat_buffers import root_of
from convmesh.layout import Mesh
from convmesh.plans.steps import Steps, Transfer
from convmesh.plans.summing import Reduction

Axes = tuple[str, ...]

SCATTERED, TOGETHER = "data", "height"
"""The axis along which a sharded reduction scatters its sums, and one in place of all others."""


@dataclass(frozen=True)
class SummedAxes:
    """A rank on a mesh of only the axes that its sums use; `names` says what the axes of that mesh stand for."""

    open: OpenMesh
    names: Mapping[Axes, Axes]

    @classmethod
    def of(cls, mesh: OpenMesh, sum_axes: Iterable[Axes], name: Reduction) -> SummedAxes:
        """Axes that are only used together become one, unless hosts distinguish them. The rank's place matters along
        the scattered axis alone; elsewhere, only whether it is the first."""
        used = {axes for axes in sum_axes if mesh.mesh.extent(axes) > 1}
        if name in ("broadcast", "hierarchical") or len(used) != 1:
            return cls(mesh, {})
        (axes,) = used
        scattered = tuple(axis for axis in axes if axis == SCATTERED and name == "sharded")
        together = tuple(axis for axis in axes if axis not in scattered)
        parts, others = mesh.mesh.extent(scattered), mesh.mesh.extent(together)
        is_first = root_of(mesh, together) == mesh.rank
        place = mesh.mesh.part(scattered, mesh.mesh.coordinates(mesh.rank))
        reduced = Mesh(**{SCATTERED: parts, TOGETHER: others})
        rank = place * others + (0 if is_first else 1)
        inside = tuple(axis for axis in (SCATTERED, TOGETHER) if reduced.axes.get(axis, 1) > 1)
        names = {inside: axes, (SCATTERED,): scattered, (TOGETHER,): together}
        return cls(dry_mesh(reduced, rank, mesh.stands_for), {key: names[key] for key in names if names[key]})

    def inside(self, axes: Axes) -> Axes:
        """The axes of one sum on the smaller mesh; () where one rank has it all."""
        if not self.names:
            return axes
        return next((new for new, old in self.names.items() if old == axes), ())

    def outside(self, steps: Steps) -> Steps:
        """Steps on the smaller mesh, as the rank's own; the same tuple where none is a transfer."""
        if not self.names or not any(isinstance(step, Transfer) for step in steps):
            return steps
        return tuple(replace(s, axes=self.names.get(s.axes, s.axes)) if isinstance(s, Transfer) else s for s in steps)
