"""A test of a split operator, as a value that can be sent to the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from convmesh.dist import OpenMesh, open_mesh
from convmesh.kernels.memory_format import CHANNELS_LAST
from convmesh.layout import Mesh
from convmesh.layout.mesh import space_axes
from convmesh.testing.compare import check_split

Cut = Mapping[int, str | tuple[str, ...]]


def natural_cut(mesh: Mesh, dims: int) -> dict[int, str]:
    """Samples cut by `data`, the last dims of a tensor with `dims` dims by `depth`, `height` and `width`."""
    cut = {2 + i: name for i, name in enumerate(space_axes(dims - 2)) if name in mesh.axes}
    return ({0: "data"} if "data" in mesh.axes else {}) | cut


@dataclass(frozen=True)
class SplitCase:
    """`fn(*inputs, *params)` on random tensors of the given shapes, with inputs cut over `mesh`.

    `fn` must be picklable: a module-level function, or `functools.partial` of one. Integer inputs are drawn below
    `classes`. `cuts` defaults to the natural cut of each input.
    """

    fn: Callable[..., Any]
    mesh: Mesh
    inputs: tuple[tuple[int, ...], ...]
    params: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.float64
    integer_inputs: frozenset[int] = field(default_factory=frozenset)
    classes: int = 2
    cuts: tuple[Cut, ...] | None = None
    memory_format: torch.memory_format = torch.contiguous_format
    seed: int = 0
    device: str = "cpu"

    def check(self) -> None:
        """Compare with a single device; call it on every rank of a pool of `mesh.size` ranks."""
        generator = torch.Generator().manual_seed(self.seed)
        inputs = [self._input(i, shape, generator) for i, shape in enumerate(self.inputs)]
        params = [self._values(shape, generator) for shape in self.params]
        cuts = self.cuts or tuple(natural_cut(self.mesh, len(shape)) for shape in self.inputs)
        check_split(self.fn, inputs, params, opened(self.mesh, self.device), cuts, self.seed)

    def _input(self, index: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if index in self.integer_inputs:
            return torch.randint(0, self.classes, shape, generator=generator).to(self.device)
        values = self._values(shape, generator)
        wanted = CHANNELS_LAST.get(len(shape))
        return values.to(memory_format=self.memory_format) if self.memory_format == wanted else values

    def _values(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device, self.dtype)


_open: dict[tuple[Mesh, str], OpenMesh] = {}


def opened(mesh: Mesh, device: str = "cpu") -> OpenMesh:
    """The mesh over all ranks of this process's job, opened once."""
    if (mesh, device) not in _open:
        _open[mesh, device] = open_mesh(mesh, device=device)
    return _open[mesh, device]
