"""The check of split operators must fail for wrong operators."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from convmesh import Layout, Mesh, Sharded
from convmesh.dist import OpenMesh, copy_over, sum_over
from convmesh.testing import RankError, RankPool, SplitCase, adjoint_error, assert_close, check_split, opened, run_ranks
from tests.conftest import Pools


class _Scale(torch.autograd.Function):
    """Multiplies values and gradients by different numbers: a linear operator with a wrong adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float, slope: float) -> torch.Tensor:
        ctx.slope = slope
        return x * value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.slope, None, None


def scale(x: torch.Tensor, value: float, slope: float) -> torch.Tensor:
    result: torch.Tensor = _Scale.apply(x, value, slope)
    return result


def scaled_sum(x: Any, w: torch.Tensor) -> Any:
    """The right one: `w` times the sum over a cut dim."""
    if not isinstance(x, Sharded):
        return (x * w).sum(2)
    return _summed(x, x.local * copied(x, w))


def copied(x: Sharded, w: torch.Tensor) -> torch.Tensor:
    (weight,) = copy_over(x.mesh, x.layout.axes, w)
    assert weight is not None
    return weight


def _summed(x: Sharded, product: torch.Tensor) -> Sharded:
    total = sum_over(product.sum(2), x.mesh, x.layout.axes_of([2]))
    cuts = x.layout.with_whole([2]).cuts
    return Sharded(total, Layout(x.mesh.mesh, (*cuts[:2], *cuts[3:])), x.mesh)


def wrong_output(x: Any, w: torch.Tensor) -> Any:
    result = scaled_sum(x, w)
    return result.like(scale(result.local, 1 + 1e-6, 1)) if isinstance(x, Sharded) else result


def output_of_one_shard(x: Any, w: torch.Tensor) -> Any:
    """Forgets to sum over ranks."""
    if not isinstance(x, Sharded):
        return scaled_sum(x, w)
    cuts = x.layout.with_whole([2]).cuts
    return Sharded((x.local * copied(x, w)).sum(2), Layout(x.mesh.mesh, (*cuts[:2], *cuts[3:])), x.mesh)


def wrong_input_gradient(x: Any, w: torch.Tensor) -> Any:
    return scaled_sum(x.like(scale(x.local, 1, 1 + 1e-6)) if isinstance(x, Sharded) else x, w)


def wrong_parameter_gradient(x: Any, w: torch.Tensor) -> Any:
    return scaled_sum(x, scale(w, 1, 1 + 1e-6) if isinstance(x, Sharded) else w)


def parameter_gradient_of_one_rank(x: Any, w: torch.Tensor) -> Any:
    """Forgets that the weight serves other ranks too."""
    return _summed(x, x.local * w) if isinstance(x, Sharded) else scaled_sum(x, w)


def wrong_shape(x: Any, w: torch.Tensor) -> Any:
    result = scaled_sum(x, w)
    return result.like(result.local[:, :1]) if isinstance(x, Sharded) else result


def wrong_type(x: Any, w: torch.Tensor) -> Any:
    result = scaled_sum(x, w)
    return result.like(result.local.float()) if isinstance(x, Sharded) else result


def plain_output(x: Any, w: torch.Tensor) -> Any:
    result = scaled_sum(x, w)
    return result.local if isinstance(x, Sharded) else result


def lost_gradient(x: Any, w: torch.Tensor) -> Any:
    return scaled_sum(x.detach() if isinstance(x, Sharded) else x, w)


def too_many_outputs(x: Any, w: torch.Tensor) -> Any:
    result = scaled_sum(x, w)
    return (result, result) if isinstance(x, Sharded) else result


def case(fn: Callable[..., Any]) -> SplitCase:
    return SplitCase(fn, Mesh(data=2, depth=2), ((4, 2, 5, 4, 4),), ((2, 1, 1, 1),))


WRONG = {
    wrong_output: "output 0: relative error",
    output_of_one_shard: "output 0: relative error",
    wrong_input_gradient: "gradient of input 0: relative error",
    wrong_parameter_gradient: "gradient of parameter 0: relative error",
    parameter_gradient_of_one_rank: "gradient of parameter 0: relative error",
    wrong_shape: "output 0: shape (2, 1, 4, 4), not (2, 2, 4, 4)",
    wrong_type: "output 0: torch.float32 instead of torch.float64",
    plain_output: "output 0 is a Tensor, not a Sharded tensor",
    lost_gradient: "gradient of input 0: relative error",
    too_many_outputs: "2 outputs instead of 1",
}


def test_a_right_operator_passes(pools: Pools) -> None:
    pools[4].run(SplitCase.check, case(scaled_sum))


@pytest.mark.parametrize(("fn", "message"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_operator_fails(fn: Callable[..., Any], message: str) -> None:
    with RankPool(4) as pool, pytest.raises(RankError, match=re.escape(message)):
        pool.run(SplitCase.check, case(fn))


def close(found: list[float], expected: list[float]) -> None:
    whole = torch.tensor(expected)
    assert_close(torch.tensor(found), whole, whole, "it")


def test_differences_count_against_the_largest_value() -> None:
    close([1e-6, 1.0], [0.0, 1.0])
    with pytest.raises(AssertionError, match=r"it: relative error 0\.0001 > 1e-05"):
        close([1e-4, 1.0], [0.0, 1.0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_must_be_so_in_both(value: float) -> None:
    close([value, 1.0], [value, 1.0])
    for found, expected in (([value, 1.0], [1.0, 1.0]), ([1.0, 1.0], [value, 1.0]), ([-value, 1.0], [1.0, 1.0])):
        with pytest.raises(AssertionError):
            close(found, expected)


def test_integers_must_be_equal() -> None:
    one, two = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert_close(one, one, one, "it")
    with pytest.raises(AssertionError, match="it differs"):
        assert_close(one, two, two, "it")


def test_the_adjoint_check_finds_a_wrong_adjoint() -> None:
    def error(slope: float) -> float:
        mesh: OpenMesh = opened(Mesh(width=2))
        x, y = torch.arange(1.0, 6.0, dtype=torch.float64), torch.arange(5.0, 0.0, -1, dtype=torch.float64)
        return adjoint_error(lambda t: scale(t, 3, slope), x, y, mesh)

    assert max(run_ranks(2, error, 3.0)) < 1e-14
    assert min(run_ranks(2, error, 3.1)) > 1e-3


def test_a_user_may_call_the_check_on_tensors_of_their_own() -> None:
    def check() -> None:
        x, w = torch.randn(2, 1, 6, 2, 2, dtype=torch.float64), torch.randn(1, 1, 1, 1, dtype=torch.float64)
        check_split(scaled_sum, [x], [w], opened(Mesh(depth=2)), [{2: "depth"}])

    torch.manual_seed(0)
    run_ranks(2, check)
