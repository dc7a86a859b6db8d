"""Window attention on tensors of (samples, height, width, channels): what shifts of windows send."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.lowering import lower
from convmesh.plans import Transfer
from tests.conftest import Pools
from tests.lowering.test_program_traffic import ByAxes, step, told

SHAPE, CHANNELS, WINDOW, SHIFT = (2, 3, 16, 16), 8, 4, 2


class Windows(nn.Module):
    """Patches, shifted windows as in Swin Transformers, attention in each, and the shift back."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv = nn.Conv2d(3, CHANNELS, 1), nn.Linear(CHANNELS, 3 * CHANNELS)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        x = F.pad(x, (0, 0, 0, -w % WINDOW, 0, -h % WINDOW))
        y = torch.roll(x, (-SHIFT, -SHIFT), (1, 2))
        y = y.view(n, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(-1, WINDOW * WINDOW, c)
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, c // 2)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = y.view(n, h // WINDOW, w // WINDOW, WINDOW, WINDOW, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return x + torch.roll(y, (SHIFT, SHIFT), (1, 2))


@pytest.mark.filterwarnings("ignore")
def test_a_shift_sends_its_rows_alone_and_padding_nothing() -> None:
    plan = cm.plan(Windows(), SHAPE, Mesh(height=2), "spatial")
    program = lower(plan.source, plan).program
    sent = {
        node.layer: sum(s.bytes_sent for s in node.forward if isinstance(s, Transfer)) for node in program.nodes
    }  # fmt: skip
    assert sent["pad"] == 0
    assert sent["roll"] == 2 * SHIFT * 16 * CHANNELS * 4  # of both samples, to the rank above


def sent_here() -> tuple[ByAxes, ByAxes]:
    torch.manual_seed(0)
    model, x = Windows().double(), torch.randn(SHAPE, dtype=torch.float64)
    net = cm.parallelize(model, cm.plan(model, SHAPE, Mesh(height=2), "spatial"))
    return step(net, x), told(net.program)


def test_windows_send_what_their_program_says(pools: Pools) -> None:
    for sent, program in pools[2].run(sent_here):
        assert sent == program
        assert sent


def test_windows_are_exact() -> None:
    model = Windows()
    verified = cm.verify(model, SHAPE, cm.plan(model, SHAPE, Mesh(height=2), "spatial"), steps=1)
    assert verified.ok, str(verified)
