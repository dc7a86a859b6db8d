"""Sums in low rank: what they keep, what they lose, and what becomes of that."""

from typing import Any

import pytest
import torch
from torch import nn

from convmesh import Mesh, UnsupportedError
from convmesh.dist import dry_mesh
from convmesh.gradients.low_rank import Factored, LowRankBucket, LowRankReducer
from convmesh.gradients.scaler import GradScaler
from convmesh.testing import RankPool, opened

Pools = dict[int, RankPool]
ROWS, COLUMNS, STEPS = 24, 3 * 4 * 5, 6


def parts(rank: int, steps: int = STEPS) -> torch.Tensor:
    """This rank's gradients of a weight, of all steps."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(steps, ROWS, 3, 4, 5, generator=generator, dtype=torch.float64)


def weights() -> tuple[nn.Parameter, nn.Parameter]:
    """A weight that travels in low rank, and one that does not."""
    kernel = torch.zeros(ROWS, 3, 4, 5, dtype=torch.float64)
    return nn.Parameter(kernel), nn.Parameter(torch.zeros(7, dtype=torch.float64))


def errors(reducer: LowRankReducer) -> torch.Tensor:
    """What this rank has not sent of the first weight."""
    (bucket,) = reducer.buckets
    assert isinstance(bucket, LowRankBucket)
    (factored,) = bucket._factored.values()
    return factored.error


def over_steps() -> tuple[Any, ...]:
    """Sums of the gradients that steps got, what is left of them, the exact sums, and those of the other weight."""
    mesh = opened(Mesh(data=2))
    kernel, bias = weights()
    reducer = LowRankReducer(mesh, [(kernel, ("data",)), (bias, ("data",))], rank=4)
    got, exact = torch.zeros_like(kernel), torch.zeros_like(kernel)
    for step, part in enumerate(parts(mesh.rank)):
        ((kernel * part).sum() + (mesh.rank + step) * bias.sum()).backward()
        assert kernel.grad is not None
        assert bias.grad is not None
        assert bias.grad.tolist() == [2.0 * step + 1] * 7, "exact"
        got += kernel.grad
        exact += sum(parts(rank)[step] for rank in range(2))
        kernel.grad = bias.grad = None
    return got.detach(), errors(reducer).clone(), exact.detach()


def test_what_is_not_sent_in_one_step_is_kept_for_the_next(pools: Pools) -> None:
    (got, left, exact), (got_there, left_there, _) = pools[2].run(over_steps)
    assert torch.equal(got, got_there), "to the bit"
    assert not torch.allclose(got, exact), "or nothing would be lost"
    torch.testing.assert_close(got + (left + left_there).view_as(got), exact)


def of_low_rank(memory_format: torch.memory_format) -> float:
    """The error of a sum whose parts have rank one each, where two travel."""
    mesh = opened(Mesh(data=2))
    generator = torch.Generator().manual_seed(3)
    columns = [torch.randn(ROWS, 1, 1, 1, generator=generator, dtype=torch.float64) for _ in range(2)]
    rows = [torch.randn(1, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2)]
    kernel = nn.Parameter(weights()[0].detach().to(memory_format=memory_format))
    reducer = LowRankReducer(mesh, [(kernel, ("data",))], rank=2)
    (kernel * columns[mesh.rank] * rows[mesh.rank]).sum().backward()
    assert kernel.grad is not None
    assert kernel.grad.stride() == kernel.stride()
    reducer.close()
    return float((kernel.grad - sum(c * r for c, r in zip(columns, rows, strict=True))).abs().max())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_sum_of_low_rank_is_exact(memory_format: torch.memory_format, pools: Pools) -> None:
    assert max(pools[2].run(of_low_rank, memory_format)) < 1e-12


def test_each_step_begins_where_the_last_one_ended() -> None:
    """Of one gradient, again and again, the nearest matrix of the rank is found: power iterations."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64) * 0.8 ** torch.arange(COLUMNS)
    left, right = torch.zeros(ROWS, 2, dtype=torch.float64), torch.randn(COLUMNS, 2, generator=generator).double()
    factored = Factored(gradient.clone(), torch.zeros_like(gradient), left, right)
    distances = []
    for _ in range(100):
        factored.gradient.copy_(gradient)
        factored.error.zero_()
        factored.begin()
        factored.turn()
        factored.end()
        distances.append(float((factored.gradient - gradient).norm()))
    best = float(torch.linalg.svdvals(gradient)[2:].norm())
    assert distances[0] > 1.05 * best
    assert distances[-1] == pytest.approx(best, rel=1e-3)


def with_an_unused_step() -> tuple[Any, ...]:
    """A step in which no rank uses the weight: it has no gradient then, and nothing of old errors is lost."""
    mesh = opened(Mesh(data=2))
    kernel, bias = weights()
    reducer = LowRankReducer(mesh, [(kernel, ("data",)), (bias, ("data",))], rank=4)
    ((kernel * parts(mesh.rank)[0]).sum() + bias.sum()).backward()
    before = errors(reducer).clone()
    kernel.grad = None
    bias.sum().backward()
    return kernel.grad is None, before, errors(reducer).clone()


def test_a_weight_that_is_not_used_keeps_what_is_to_be_sent(pools: Pools) -> None:
    results = pools[2].run(with_an_unused_step)
    assert all(has_none for has_none, _, _ in results)
    before, after = (sum(result[index] for result in results) for index in (1, 2))
    torch.testing.assert_close(after, before)


def accumulated() -> tuple[Any, ...]:
    """Two passes before one sum, against one pass of both."""
    mesh = opened(Mesh(data=2))
    found = []
    for passes in ([0, 1], [2]):
        kernel, _ = weights()
        reducer = LowRankReducer(mesh, [(kernel, ("data",))], rank=4)
        both = torch.cat([parts(mesh.rank)[:2], parts(mesh.rank)[:2].sum(0, keepdim=True)])
        with reducer.no_sync():
            for index in passes[:-1]:
                (kernel * both[index]).sum().backward()
        (kernel * both[passes[-1]]).sum().backward()
        found.append(kernel.grad)
        reducer.close()
    return tuple(found)


def test_accumulated_gradients_are_summed_once(pools: Pools) -> None:
    for twice, once in pools[2].run(accumulated):
        torch.testing.assert_close(twice, once)


def after_reset() -> tuple[float, float]:
    mesh = opened(Mesh(data=2))
    kernel, _ = weights()
    reducer = LowRankReducer(mesh, [(kernel, ("data",))], rank=1)
    (kernel * parts(mesh.rank)[0]).sum().backward()
    before = float(errors(reducer).norm())
    reducer.reset()
    return before, float(errors(reducer).norm())


def test_a_reset_forgets_what_is_to_be_sent(pools: Pools) -> None:
    assert all(before > 1 and after == 0 for before, after in pools[2].run(after_reset))


def test_half_precision_travels_in_single_and_small_weights_whole() -> None:
    mesh = dry_mesh(Mesh(data=2))
    half = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16, device="meta"))
    small = nn.Parameter(torch.zeros(4, 4, device="meta"))
    complex_ = nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64, device="meta"))
    reducer = LowRankReducer(mesh, [(p, ("data",)) for p in (half, small, complex_)], rank=2)
    by_type = {bucket.slots[0].parameter.dtype: bucket for bucket in reducer.buckets}
    assert {kind: bucket.elements for kind, bucket in by_type.items()} == {
        torch.bfloat16: 2 * (64 + 64) + 1,
        torch.float32: 4 * 4 + 1,
        torch.complex64: 64 * 64 + 1,
    }
    found = by_type[torch.bfloat16]
    assert isinstance(found, LowRankBucket)
    assert found.buffer.values.dtype == torch.float32


def scaled() -> None:
    kernel, _ = weights()
    reducer = LowRankReducer(opened(Mesh(data=2)), [(kernel, ("data",))], rank=1)
    optimizer, scaler = torch.optim.SGD([kernel], lr=0.1), GradScaler("cpu")
    scaler.scale(kernel.sum()).backward()
    with pytest.raises(UnsupportedError, match="cannot scale gradients that are summed in low rank"):
        scaler.unscale_(optimizer)
    reducer.close()


def test_scaling_is_refused(pools: Pools) -> None:
    pools[2].run(scaled)
