"""Functions that torch runs on shards of whole samples give what their split versions give, and only then."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from convmesh import Mesh
from convmesh.dist import OpenMesh, StepSettings, dry_mesh
from convmesh.errors import ConvMeshError
from convmesh.kernels.fusing import fusing
from convmesh.ops.core import by_samples
from convmesh.ops.core.sharded import Sharded, shard

Call = Callable[..., Any]
_generator = torch.Generator().manual_seed(0)


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


WEIGHT, MATRIX, VECTOR = _drawn(6, 4, 3, 3), _drawn(5, 8), _drawn(8)
SCALE, SHIFT = _drawn(4), _drawn(4)

CALLS: dict[str, Call] = {
    "conv2d": lambda x: F.conv2d(x, WEIGHT, None, stride=2, padding=1),
    "conv2d same": lambda x: F.conv2d(x, WEIGHT, padding="same"),
    "linear": lambda x: F.linear(x, MATRIX, MATRIX[:, 0]),
    "layer norm": lambda x: F.layer_norm(x, (8, 8)),
    "layer norm of features": lambda x: F.layer_norm(x, (8,), VECTOR, VECTOR),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double(), SCALE, SHIFT, True),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive max pool": lambda x: F.adaptive_max_pool2d(x, 3),
    "interpolate": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, size=(4, 5)),
    "cat": lambda x: torch.cat([x, 2 * x], 1),
    "cat from the end": lambda x: torch.cat((x, x, x), dim=-1),
    "flatten": lambda x: torch.flatten(x, 1),
    "flatten some": lambda x: x.flatten(2),
    "softmax": lambda x: F.softmax(x, 1),
    "log softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "mean of a dim": lambda x: torch.mean(x, dim=3),
}
NEVER: dict[str, Call] = {
    "cat of samples": lambda x: torch.cat([x, x]),
    "softmax of samples": lambda x: x.softmax(0),
    "flatten all": lambda x: x.flatten(),
    "mean of all": lambda x: x.mean(),
    "mean of samples": lambda x: x.mean((0, 1)),
    "pool with places": lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
}
SETTINGS = StepSettings(sums_weights=False, replica_statistics=True)


def _mesh(axes: dict[str, int]) -> OpenMesh:
    return dry_mesh(Mesh(**axes), 0, "cpu").with_settings(SETTINGS)


def _input(mesh: OpenMesh, cut: dict[int, str]) -> Sharded:
    values = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = shard(values, mesh, cut)
    x.requires_grad_()
    return x


def _run(call: Call, mesh: OpenMesh, cut: dict[int, str]) -> tuple[Any, ...]:
    """The result, its layout, the gradient, and the axes along which gradients of weights are partial."""
    noted: list[tuple[str, ...]] = []
    x = _input(replace(mesh, left_partial=noted), cut)
    result = call(x)
    if result.local.is_floating_point():
        weights = torch.randn(result.local.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (result.local * weights).sum().backward()
    return result.local.detach(), result.layout, x.local.grad, set(noted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The results that were found without split versions."""
    found: list[Any] = []
    made = by_samples._made

    def counting(*args: Any) -> Any:
        found.append(made(*args))
        return found[-1]

    monkeypatch.setattr(by_samples, "_made", counting)
    return found


@pytest.mark.parametrize("axes", [{"data": 2}, {}], ids=str)
@pytest.mark.parametrize("name", [*CALLS, *NEVER])
def test_results_are_those_of_split_versions(
    name: str, axes: dict[str, int], counted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, cut = {**CALLS, **NEVER}[name], dict.fromkeys([0], "data") if axes else {}
    if name in NEVER and axes:
        with contextlib.suppress(ConvMeshError):  # what is sent here arrives without data
            call(_input(_mesh(axes), cut))
        assert not any(x is not None for x in counted)
        return
    found = _run(call, _mesh(axes), cut)
    assert name in NEVER or any(x is not None for x in counted)
    monkeypatch.setattr(by_samples, "_keeps", {})
    expected = _run(call, _mesh(axes), cut)
    torch.testing.assert_close((found[0], found[2]), (expected[0], expected[2]), rtol=1e-10, atol=1e-12)
    assert (found[1], found[3]) == (expected[1], expected[3])


@pytest.mark.parametrize("name", ["max pool", "softmax", "conv2d"])
def test_space_that_is_cut_and_steps_for_compilers_have_split_versions(name: str, counted: list[Any]) -> None:
    mesh = _mesh({"height": 2})
    CALLS[name](_input(mesh, {2: "height"}))
    with fusing():
        CALLS[name](_input(mesh, {}))
    assert not counted


@pytest.mark.parametrize("name", ["linear", "conv2d", "layer norm of features"])
def test_weights_whose_gradients_a_layer_sums_have_split_versions(name: str, counted: list[Any]) -> None:
    CALLS[name](_input(_mesh({"data": 2}).with_settings(StepSettings()), {0: "data"}))
    assert not any(x is not None for x in counted)


def test_traced_tensors_see_each_call_once() -> None:
    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    mesh = _mesh({})
    given = _input(mesh, {})

    def normed(local: torch.Tensor) -> torch.Tensor:
        x: Any = Sharded(local, given.layout, mesh)
        y: Any = F.batch_norm(x, mean, var, training=True)
        made: torch.Tensor = y.local
        return made

    traced = make_fx(normed, tracing_mode="fake", _allow_non_fake_inputs=True)(given.local.detach())
    calls = [node for node in traced.graph.nodes if "batch_norm" in str(node.target)]
    assert len(calls) == 1


def test_what_torch_refuses_is_told_of_the_global_tensor() -> None:
    x: Any = _input(_mesh({"data": 2}), {0: "data"})
    with pytest.raises(Exception, match=r"\(4, 4, 8, 8\)"):
        F.linear(x, MATRIX.T)
    with pytest.raises(Exception, match="Dimension out of range"):
        torch.cat([x, x], 7)
