"""Matrix products, einsum and attention of tensors that are all cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import convmesh as cm
from convmesh import Mesh, OpenMesh, shard
from convmesh.dist import Traffic, dry_mesh
from convmesh.layout import Layout
from convmesh.ops.product.contraction import Contraction, arrangement
from convmesh.testing import RankPool, SplitCase, opened
from convmesh.testing.case import Cut
from tests.draws import draws

Check = Callable[[SplitCase], None]
MESH = Mesh(data=2, height=2)
CUTS: list[Cut] = [
    {},
    {0: "data"},
    {1: "height"},
    {2: "height"},
    {3: "height"},
    {0: "data", 2: "height"},
    {2: "data", 3: "height"},
]


def multiplied(a: Any, b: Any) -> Any:
    return a @ b


def summed(a: Any, b: Any, equation: str) -> Any:
    return torch.einsum(equation, a, b)


def attended(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, **options)


def masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask)


@given(cuts=st.tuples(st.sampled_from(CUTS), st.sampled_from(CUTS)), rows=st.integers(1, 5), met=st.integers(1, 6))
@draws(25)
@pytest.mark.operator("matmul", "two tensors, each cut along any dims; uneven and empty shards")
def test_matmul(cuts: tuple[Cut, Cut], rows: int, met: int, check: Check) -> None:
    check(SplitCase(multiplied, MESH, ((2, 3, rows, met), (2, 3, met, 5)), cuts=cuts))


@given(
    cuts=st.tuples(st.sampled_from(CUTS), st.sampled_from(CUTS)),
    equation=st.sampled_from(["bhid,bhjd->bhij", "bhnd,bhne->bhde", "abcd,abcd->", "...ij,...kj->...ki", "abcd,aecd"]),
)
@draws(25)
@pytest.mark.operator("einsum", "two tensors; sums over cut dims; `...`")
def test_einsum(cuts: tuple[Cut, Cut], equation: str, check: Check) -> None:
    check(SplitCase(partial(summed, equation=equation), MESH, ((2, 3, 5, 4), (2, 3, 5, 4)), cuts=cuts))


@given(cuts=st.tuples(*[st.sampled_from(CUTS)] * 3), is_causal=st.booleans(), scale=st.sampled_from([None, 0.3]))
@draws(25)
@pytest.mark.operator("scaled_dot_product_attention", "samples, heads, queries and keys cut; causal; scale")
def test_attention(cuts: tuple[Cut, Cut, Cut], is_causal: bool, scale: float | None, check: Check) -> None:
    call = partial(attended, is_causal=is_causal, scale=scale)
    check(SplitCase(call, MESH, ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)), cuts=cuts))


@given(cuts=st.tuples(*[st.sampled_from(CUTS)] * 3), shape=st.sampled_from([(5, 7), (1, 1, 5, 7), (2, 3, 1, 7)]))
@draws(12)
def test_attention_with_a_mask_that_learns(cuts: tuple[Cut, Cut, Cut], shape: tuple[int, ...], check: Check) -> None:
    check(SplitCase(masked, MESH, ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)), (shape,), cuts=cuts))


def attention_traffic(mesh: OpenMesh) -> Traffic:
    whole = torch.zeros(2, 3, 8, 4, dtype=torch.float64, device=mesh.device)
    q, k, v = (shard(whole, mesh, {2: "height"}) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad = True
    with mesh.traffic.watch() as sent:
        attended(q, k, v).sum().backward()
    return sent


def real_traffic() -> Traffic:
    return attention_traffic(opened(Mesh(height=2)))


def test_attention_sends_its_keys_and_values_once_each_way(pools: dict[int, RankPool]) -> None:
    real = pools[2].run(real_traffic)
    assert [attention_traffic(dry_mesh(Mesh(height=2), rank)) for rank in range(2)] == real
    both = 2 * (2 * 3 * 4 * 4) * 8  # this rank's keys and values: forward to the other, and their gradients back
    assert real[0].bytes_total - 8 == 2 * both  # and the sum of the result


def test_what_is_summed_over_stays_cut_only_where_that_is_cheaper() -> None:
    mesh = Mesh(height=2)
    tokens = Layout.of(mesh, (2, 64, 8), {1: "height"})
    small = arrangement(Contraction((("b", "n", "i"), ("b", "n", "j")), ("b", "i", "j")), (tokens, tokens))
    assert (small.summed, small.result.axes) == (("height",), ())
    large = arrangement(Contraction((("b", "i", "n"), ("b", "j", "n")), ("b", "i", "j")), (tokens, tokens))
    assert (large.summed, large.operands[1].axes) == ((), ())  # queries stay cut, keys are gathered


class Encoder(nn.Module):
    """Patches as tokens behind a class token, with torch's own encoder; then attention to other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        seen = self.encoder(torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1))
        crossed, weights = self.cross(seen[:, :3], seen, seen)
        return crossed.sum(1), weights, seen


@pytest.mark.filterwarnings("ignore:.*depends on `self.training`")
@pytest.mark.parametrize(
    ("strategy", "mesh"), [("spatial", Mesh(height=2)), ("data+filter", Mesh(data=2, filter=2))], ids=str
)
def test_torchs_transformers_are_exact(strategy: str, mesh: Mesh) -> None:
    model = Encoder()
    verified = cm.verify(model, (2, 3, 32, 32), cm.plan(model, (2, 3, 32, 32), mesh, strategy), steps=1)
    assert verified.ok, str(verified)
