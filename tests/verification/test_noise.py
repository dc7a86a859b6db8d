"""Networks that draw random numbers train alike on every mesh."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm

SHAPE = (4, 3, 12, 12)


def stochastic_depth(x: Any, kept: float) -> Any:
    noise = torch.empty((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device).bernoulli_(kept)
    return x * noise.div_(kept)


def drop_path(x: Any, kept: float) -> Any:
    return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(kept).div_(kept)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Any) -> Any:
        x = self.a(x)
        x = x + stochastic_depth(self.b(x), 0.5) + drop_path(x, 0.5)
        x = x + torch.randn_like(x) + torch.rand(1, 8, 1, 1, dtype=x.dtype, device=x.device)
        y = x.clone()
        y[:, 0] = 2 * x[:, 1]
        return F.relu_(x.mul(2)) + y


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("spatial", cm.Mesh(height=2)), ("data+filter", cm.Mesh(data=2, filter=2))]
)
def test_noise_is_the_same_on_every_mesh(strategy: str, mesh: cm.Mesh) -> None:
    model = Noisy()
    verified = cm.verify(model, SHAPE, cm.plan(model, SHAPE, mesh, strategy), steps=2)
    assert verified.ok, str(verified)
