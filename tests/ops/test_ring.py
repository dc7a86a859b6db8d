"""Attention with keys and values that pass round the ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh, OpenMesh, shard
from convmesh.dist import Traffic, dry_mesh
from convmesh.kernels.attention_blocks import KeyBlock, attend, gradients
from convmesh.ops.core.sharded import Sharded
from convmesh.testing import RankPool, SplitCase, opened
from convmesh.testing.case import Cut
from tests.draws import draws

Check = Callable[[SplitCase], None]
TOKENS: Cut = {2: "height"}
MESHES = [Mesh(height=2), Mesh(height=4), Mesh(data=2, height=2)]


def ringed(x: Any) -> Any:
    """The tensor on a mesh on which keys and values pass round."""
    if not isinstance(x, Sharded):
        return x
    return Sharded(x.local, x.layout, x.mesh.with_settings(replace(x.mesh.settings, attention="ring")))


def attended(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    q, k, v = map(ringed, (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


@given(
    mesh=st.sampled_from(MESHES), queries=st.integers(1, 9), keys=st.integers(1, 9), values=st.sampled_from([4, 6]),
    is_causal=st.booleans(), scale=st.sampled_from([None, 0.3]), samples=st.booleans(),
)  # fmt: skip
@draws(20)
@pytest.mark.operator("scaled_dot_product_attention", "keys and values passed round; uneven and empty shards")
def test_ring(
    mesh: Mesh, queries: int, keys: int, values: int, is_causal: bool, scale: float | None, samples: bool, check: Check
) -> None:
    cut = {**TOKENS, 0: "data"} if samples and "data" in mesh.axes else TOKENS
    call = partial(attended, is_causal=is_causal, scale=scale)
    check(SplitCase(call, mesh, ((2, 3, queries, 4), (2, 3, keys, 4), (2, 3, keys, values)), cuts=(cut,) * 3))


@given(shape=st.sampled_from([(5, 7), (1, 1, 5, 7), (2, 3, 1, 7), (2, 1, 1, 7)]))
@draws(6)
def test_ring_with_a_bias_that_learns(shape: tuple[int, ...], check: Check) -> None:
    """A relative position bias, for all samples or for each."""
    check(SplitCase(attended, Mesh(height=2), ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)), (shape,), cuts=(TOKENS,) * 3))


def masked(q: Any, k: Any, v: Any, hides: int) -> Any:
    mask = torch.ones(5, 7, dtype=torch.bool, device=q.device).triu(hides)
    return attended(q, k, v, mask)


@pytest.mark.parametrize("hides", [-1, 3])
def test_ring_with_a_mask_that_hides_whole_parts(hides: int, check: Check) -> None:
    check(
        SplitCase(
            partial(masked, hides=hides), Mesh(height=4), ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)), cuts=(TOKENS,) * 3
        )
    )


def traffic(mesh: OpenMesh, is_causal: bool) -> Traffic:
    whole = torch.zeros(2, 3, 8, 4, dtype=torch.float64, device=mesh.device)
    q, k, v = (ringed(shard(whole, mesh, {2: "height"})) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad = True
    with mesh.traffic.watch() as sent:
        made: Any = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        made.local.sum().backward()
    return sent


def real_traffic(ranks: int, is_causal: bool) -> Traffic:
    return traffic(opened(Mesh(height=ranks)), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_keys_and_values_are_sent_twice_and_their_gradients_once(
    pools: dict[int, RankPool], ranks: int, is_causal: bool
) -> None:
    real = pools[ranks].run(real_traffic, ranks, is_causal)
    assert [traffic(dry_mesh(Mesh(height=ranks), rank), is_causal) for rank in range(ranks)] == real
    part = 2 * (2 * 3 * (8 // ranks) * 4) * 8
    sent = [3 * (ranks - 1) * part] * ranks
    if is_causal:  # keys go to the ranks behind their own, gradients to those before
        sent = [(2 * (ranks - 1 - rank) + rank) * part for rank in range(ranks)]
    assert [each.bytes_total for each in real] == sent


def dropped(ranks: int, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = opened(Mesh(height=ranks))
    mesh = mesh.with_settings(replace(mesh.settings, attention=way))  # type: ignore[arg-type]
    mesh.seeds.manual_seed(3)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (shard(torch.randn(2, 3, 6, 4, generator=generator).double(), mesh, {2: "height"}) for _ in range(3))
    k.requires_grad = True
    made: Any = F.scaled_dot_product_attention(q, k, v, None, 0.4)  # type: ignore[arg-type]
    (made * made).sum().backward()
    assert k.local.grad is not None
    return made.gather().detach(), k.like(k.local.grad).gather()


def test_dropout_is_the_same_gathered_and_passed_round(pools: dict[int, RankPool]) -> None:
    (expected, *_) = pools[1].run(dropped, 1, "gather")
    for found in pools[2].run(dropped, 2, "ring"):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_fused_kernel_finds_what_is_written_out(dtype: torch.dtype, is_causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 6, 8, dtype=dtype) for _ in range(4))
    block = KeyBlock(0.4, is_causal=is_causal)
    made, sums = attend(q, k, v, block, "cpu")
    torch.testing.assert_close((made, sums), attend(q, k, v, block, "other"), rtol=1e-5, atol=1e-5)
    fused, written = (gradients(grad, q, k, v, made, sums, block, device) for device in ("cpu", "other"))
    torch.testing.assert_close(fused[:3], written[:3], rtol=1e-5, atol=1e-5)
