"""Layers on constants alone, such as learned position encodings: every rank computes them, with exact gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh, UnsupportedError
from convmesh.plans import strategy_for
from tests.conftest import Pools

SHAPE = (2, 3, 8, 8)


class Positions(nn.Module):
    """Waves of the place, mixed by a layer that learns; added to every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(2, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        rows = torch.ones(y.shape[2], y.shape[3], dtype=self.mix.weight.dtype).cumsum(0)
        result: torch.Tensor = y + self.mix(torch.stack([rows.sin(), rows.cos()])[None])
        return result


class Standardised(nn.Module):
    """A convolution whose weight is computed from a parameter, as in networks without batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = F.batch_norm(self.weight.view(1, 4, -1), None, None, self.gain * 0.5, training=True)
        return F.conv2d(x, flat.reshape_as(self.weight), padding=1)


def gradients(make: type[nn.Module], mesh: Mesh | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x, target = make().double(), torch.randn(SHAPE).double(), torch.randn(2, 4, 8, 8).double()
    if mesh is None:
        F.mse_loss(model(x), target).backward()
        return {name: p.grad for name, p in model.named_parameters()}
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy_for(mesh)), loss=F.mse_loss)
    net(net.shard_input(x), net.shard_target(target)).backward()
    return net.full_gradients()


@pytest.mark.parametrize("make", [Positions, Standardised])
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(height=2), Mesh(filter=2)], ids=str)
def test_a_layer_on_constants_learns(pools: Pools, make: type[nn.Module], mesh: Mesh) -> None:
    (expected,) = pools[1].run(gradients, make, None)
    for found in pools[2].run(gradients, make, mesh):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.linalg.inv(x @ x)
        return result


def test_a_layer_that_fails_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"layer '1\.linalg_inv' .*`linalg.inv` has no split version"):
        cm.plan(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Reads()), SHAPE, Mesh(height=2), "spatial")


class LearntBias(nn.Module):
    """A bias that a layer makes of constants, as the positions of windows are in Swin Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(6.0).view(6, 1))
        self.make, self.mix = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x) + self.make(self.places)  # type: ignore[no-any-return]


def test_layers_on_constants_learn() -> None:
    model = LearntBias()
    verified = cm.verify(model, (4, 6, 4), cm.plan(model, (4, 6, 4), Mesh(filter=2), "filter"), steps=2)
    assert verified.ok, str(verified)
