"""A module that stays closed and holds a batch norm sees the whole batch, on every rank."""

from typing import Any

import pytest
import torch
from torch import nn

import convmesh as cm

SHAPE = (4, 3, 8, 8)


class Looks(nn.Module):
    """Looks at a value, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.conv(self.norm(x)) if float(x.detach().abs().max()) >= 0 else x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("strategy", "mesh"), [("data", cm.Mesh(data=2)), ("spatial", cm.Mesh(height=2))])
def test_statistics_of_a_closed_module_are_the_batchs(strategy: str, mesh: cm.Mesh) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Looks(), nn.Conv2d(4, 2, 1))
    verified = cm.verify(model, SHAPE, cm.plan(model, SHAPE, mesh, strategy), steps=2)
    assert verified.ok, str(verified)
