"""A network whose ranks work on their own samples, so that gradients are partial; whole in one process."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from convmesh import Mesh, OpenMesh
from convmesh.dist.cut_weights import cut_weight
from convmesh.gradients.reduction import AxesOf

SAMPLES = 7


class Towers(nn.Module):
    """One tower works on samples cut by all `axes`, one on samples cut by `data` only, one has a cut weight."""

    def __init__(self, mesh: OpenMesh | None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fine = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
        self.coarse = nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
        self.unused = nn.Linear(2, 2)
        self.cut = nn.Parameter(torch.randn(6, 5))
        self.to(dtype)
        self.mesh = mesh
        self.reducer: Any = None
        """Kept here: it sums gradients for as long as it is held."""
        if mesh is not None and "channel" in mesh.mesh.axes:
            self.cut = nn.Parameter(cut_weight(self.cut.detach(), mesh, {0: ("channel",)}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean loss over all samples."""
        fine = self.fine(self.samples(x, ("data", "height")))
        coarse = self.coarse(self.samples(x, ("data",))[:, None])
        weight = self.cut.to_local() if isinstance(self.cut, DTensor) else self.cut
        cut = torch.tanh(self.samples(x, ("data",)) @ weight.T)
        loss: torch.Tensor = (fine.square().sum() + coarse.square().sum() + cut.square().sum()) / len(x)
        return loss

    def samples(self, x: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """Unequal parts: the last takes the rest."""
        if self.mesh is None:
            return x
        parts = self.mesh.mesh.extent(axes)
        part = self.mesh.mesh.part(axes, self.mesh.mesh.coordinates(self.mesh.rank))
        return x[part : part + 1] if part < parts - 1 else x[part:]

    def axes_of(self) -> AxesOf:
        fine = [(p, ("data", "height")) for p in self.fine.parameters()]
        coarse = [(p, ("data",)) for p in (*self.coarse.parameters(), *self.unused.parameters(), self.cut)]
        return fine + coarse


def batches(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]


def whole(tensor: torch.Tensor | None) -> Any:
    """A whole gradient or weight, as on one device."""
    if tensor is None:
        return None
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()


def gradients(net: nn.Module) -> dict[str, Any]:
    return {name: whole(p.grad) for name, p in net.named_parameters()}


def assert_same(found: dict[str, Any], expected: dict[str, Any], most: float = 1e-12) -> None:
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, f"{name} has a gradient"
            continue
        assert found[name] is not None, f"{name} has no gradient"
        error = (found[name] - value).abs().max() / value.abs().max().clamp(min=1e-300)
        assert error <= most, f"{name}: relative error {error:.3g}"


MESHES = [Mesh(data=2), Mesh(data=2, height=2), Mesh(data=2, channel=2)]
