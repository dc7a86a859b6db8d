"""A network of attention, computed weights and a batch norm of its own: what is sent is what its program says."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.graph.captured import capture
from tests.conftest import Pools
from tests.lowering.test_program_traffic import ByAxes, step, told

SHAPE = (2, 3, 32, 32)


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x: Any) -> Any:
        return F.relu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.gain = nn.Conv2d(3, 16, 4, 4), OwnNorm(16), nn.Parameter(torch.ones(16, 1, 1, 1))
        self.token, self.attend = nn.Parameter(torch.randn(1, 1, 16)), nn.MultiheadAttention(16, 4, batch_first=True)
        self.kernel, self.last = nn.Parameter(torch.randn(16, 16, 3, 3)), nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        x = F.conv2d(self.norm(self.patches(x)), self.kernel * self.gain, padding=1)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1)
        tokens = tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0]
        few = self.attend(tokens[:, :3], tokens, tokens, need_weights=False)[0]
        return self.last(torch.einsum("bnc,bmc->bmc", tokens, few))


def sent_here(mesh: Mesh, strategy: str) -> tuple[ByAxes, ByAxes]:
    torch.manual_seed(0)
    model, x = Attends().double(), torch.randn(SHAPE, dtype=torch.float64)
    net = cm.parallelize(model, cm.plan(model, SHAPE, mesh, strategy))
    return step(net, x), told(net.program)


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("spatial", Mesh(height=2)), ("filter", Mesh(filter=2)), ("data", Mesh(data=2))], ids=str
)
def test_attention_sends_what_its_program_says(pools: Pools, strategy: str, mesh: Mesh) -> None:
    for sent, program in pools[2].run(sent_here, mesh, strategy):
        assert sent == program
        assert sent


def test_it_is_exact() -> None:
    model, mesh = Attends(), Mesh(data=2, height=2)
    verified = cm.verify(model, SHAPE, cm.plan(model, SHAPE, mesh, "data+spatial"), steps=2)
    assert verified.ok, str(verified)


@pytest.mark.parametrize("seed", [7, 35])  # weights for which gradients of a bias are little but rounding in float32
def test_rounding_is_no_reason_to_refuse_a_network(seed: int) -> None:
    torch.manual_seed(seed)
    assert capture(Attends(), SHAPE).unchecked == ""
