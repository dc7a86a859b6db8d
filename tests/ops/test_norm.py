"""Normalisation with the statistics of the global tensor."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convmesh import Mesh, UnsupportedError, replicated, shard
from convmesh.layout.mesh import SPACE_AXES
from convmesh.testing import SplitCase, assert_close, natural_cut, opened
from convmesh.testing.strategies import batch_sizes, extents, layouts, spatial_dims
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def shapes(mesh: Mesh, data: st.DataObject, channels: int = 3, fewest: int = 4, largest: int = 9) -> tuple[int, ...]:
    """N×C×space with enough values in space for well-conditioned gradients: two values always normalise to ±1."""
    spatial = data.draw(spatial_dims(mesh))
    space = extents(spatial, largest=largest).filter(lambda e: math.prod(e) >= fewest)
    return (data.draw(batch_sizes(mesh)), channels, *data.draw(space))


PRECISIONS = st.sampled_from([(torch.float64, 0.0, 4), (torch.float32, 50.0, 16)])
"""Types, shifts of the mean, and the fewest values per statistic."""


def batch_norm(x: Any, *params: Any, shift: float = 0.0, training: bool = True, eps: float = 1e-5) -> Any:
    weight, bias, mean, spread = (*params, None, None, None, None)[:4]
    if not training:
        mean, spread = mean.detach(), spread.detach() ** 2
        return F.batch_norm(x + shift, mean, spread, weight, bias, eps=eps)
    return F.batch_norm(x + shift, None, None, weight, bias, training=True, eps=eps)


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("batch_norm", "statistics of the global batch; affine or not; float32, channels-last, far means")
def test_batch_norm(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data)
    params = ((3,),) * data.draw(st.sampled_from([0, 1, 2]))
    fn = partial(batch_norm, eps=data.draw(st.sampled_from([1e-5, 1e-2])))
    layout = data.draw(st.sampled_from([torch.contiguous_format, *CHANNELS_LAST.values()]))
    check(SplitCase(fn, mesh, (shape,), params, memory_format=layout))


@on_grids
@given(data=st.data())
@pytest.mark.operator("batch_norm", "float32 with a mean far from 0")
def test_batch_norm_float32(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data, fewest=16, largest=17)
    check(SplitCase(partial(batch_norm, shift=50.0), mesh, (shape,), ((3,), (3,)), dtype=torch.float32))


@on_grids
@given(data=st.data())
@pytest.mark.operator("batch_norm", "evaluation with running statistics")
def test_batch_norm_evaluation(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    check(SplitCase(partial(batch_norm, training=False), mesh, (shapes(mesh, data),), ((3,),) * 4))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2), Mesh(height=2), Mesh(height=2, width=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "instance_norm"])
def test_large_channels_are_split_into_rows(mesh: Mesh, dtype: torch.dtype, name: str, check: Check) -> None:
    """Few large channels: rows are pieces of channels."""
    fns: dict[str, Callable[..., Any]] = {
        "batch_norm": batch_norm,
        "group_norm": partial(group_norm, groups=2),
        "instance_norm": instance_norm,
    }
    check(SplitCase(fns[name], mesh, ((3, 4, 188, 260),), ((4,), (4,)), dtype=dtype))


@on_grids
@given(data=st.data())
@pytest.mark.operator("batch_norm", "any layout: channels cut, uneven and empty parts, several axes on a dim")
def test_any_layout(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = (2, 4, *data.draw(extents(2, smallest=2, largest=9)))
    forms: list[Callable[..., Any]] = [
        batch_norm,
        instance_norm,
        partial(group_norm, groups=2),
        partial(layer_norm, last=2),
    ]
    fn = data.draw(st.sampled_from(forms))
    params = (shape[2:],) * 2 if getattr(fn, "func", fn) is layer_norm else ((4,), (4,))
    cuts = (data.draw(layouts(mesh, shape)),)
    check(SplitCase(fn, mesh, (shape,), params, cuts=cuts))  # type: ignore[arg-type]


def group_norm(x: Any, *params: Any, groups: int, shift: float = 0.0) -> Any:
    if isinstance(x, torch.Tensor) and shift:  # torch's float32 loses up to five digits of the weights' gradients
        double = [t.double() for t in (x, *params)]
        return F.group_norm(double[0] + shift, groups, *double[1:]).to(x.dtype)
    return F.group_norm(x + shift, groups, *params)


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("group_norm", "any number of groups; affine or not; float32 with a mean far from 0")
def test_group_norm(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    dtype, shift, fewest = data.draw(PRECISIONS)
    shift *= any(name in mesh.axes for name in SPACE_AXES)  # else torch's own kernel runs
    shape = shapes(mesh, data, 6, fewest, largest=17)
    groups, affine = data.draw(st.sampled_from([1, 2, 3, 6])), data.draw(st.integers(0, 2))
    check(SplitCase(partial(group_norm, groups=groups, shift=shift), mesh, (shape,), ((6,),) * affine, dtype=dtype))


def instance_norm(x: Any, *params: Any, shift: float = 0.0) -> Any:
    return F.instance_norm(x + shift, None, None, *params)


@on_grids
@given(data=st.data())
@pytest.mark.operator("instance_norm", "affine or not; running statistics; float32 with a mean far from 0")
def test_instance_norm(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    affine = data.draw(st.integers(0, 2))
    dtype, shift, fewest = data.draw(PRECISIONS)
    layout = data.draw(st.sampled_from([torch.contiguous_format, *CHANNELS_LAST.values()]))
    fn = partial(instance_norm, shift=shift)
    shape = shapes(mesh, data, 3, fewest, largest=17)
    check(SplitCase(fn, mesh, (shape,), ((3,),) * affine, dtype=dtype, memory_format=layout))


def layer_norm(x: Any, *params: Any, last: int, shift: float = 0.0) -> Any:
    return F.layer_norm(x + shift, x.shape[-last:], *params)


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("layer_norm", "over any last dims, cut or not; elementwise parameters; float32, far means")
def test_layer_norm(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    dtype, shift, fewest = data.draw(PRECISIONS)
    shape = shapes(mesh, data, 3, fewest, largest=17)
    last = data.draw(st.sampled_from([n for n in range(1, len(shape)) if math.prod(shape[-n:]) >= fewest]))
    params = (shape[-last:],) * data.draw(st.integers(0, 2))
    check(SplitCase(partial(layer_norm, last=last, shift=shift), mesh, (shape,), params, dtype=dtype))


def rms_norm(x: Any, weight: Any = None, *, last: int, eps: float | None) -> Any:
    return F.rms_norm(x, x.shape[-last:], weight, eps)


@on_grids
@given(data=st.data())
@pytest.mark.operator("rms_norm", "over any last dims, cut or not; with or without weights")
def test_rms_norm(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data, largest=6)
    last = data.draw(st.integers(1, len(shape) - 1))
    params = (shape[-last:],) * data.draw(st.integers(0, 1))
    check(SplitCase(partial(rms_norm, last=last, eps=data.draw(st.sampled_from([None, 1e-3]))), mesh, (shape,), params))


def normalize(x: Any, p: float, dim: int) -> Any:
    return F.normalize(x, p, dim)


def local_response_norm(x: Any) -> Any:
    return nn.LocalResponseNorm(2)(x)


@on_grids
@given(data=st.data())
@pytest.mark.operator("normalize, local_response_norm", "any dim, cut or not; p = 1, 2, 3, inf")
def test_normalize(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data)
    dim, p = data.draw(st.integers(-len(shape), len(shape) - 1)), data.draw(st.sampled_from([1.0, 2.0, 3.0, torch.inf]))
    check(SplitCase(partial(normalize, p=p, dim=dim), mesh, (shape,)))
    check(SplitCase(local_response_norm, mesh, (shape,)))


MODULES: dict[str, list[type[nn.Module]]] = {
    "batch": [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d],
    "instance": [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d],
}


def train_then_evaluate(module: nn.Module, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Three steps of training and one of evaluation: outputs, gradients, buffers as on a single device."""
    generator = torch.Generator().manual_seed(0)
    single, split = module.to(dtype), copy.deepcopy(module).to(dtype)
    for step in range(4):
        if step == 3:
            single.eval(), split.eval()
        x = (torch.randn(shape, generator=generator, dtype=torch.float64) * (step + 1) + 3 * step).to(dtype)
        cotangent = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        expected, sharded = single(x), shard(x, opened(mesh), natural_cut(mesh, len(shape)))
        result = split(sharded)
        here = sharded.box.slices()
        assert_close(result.local, expected[here], expected, f"output of step {step}")
        if result.local.requires_grad:
            expected.backward(cotangent)
            result.local.backward(cotangent[here])
        compare_states(split, single, step)


def compare_states(split: nn.Module, single: nn.Module, step: int) -> None:
    for name, value in single.state_dict().items():
        assert_close(split.state_dict()[name], value, value, f"{name} after step {step}")
    for name, parameter in single.named_parameters():
        gradient = split.get_parameter(name).grad
        assert gradient is not None
        assert parameter.grad is not None
        assert_close(gradient, parameter.grad, parameter.grad, f"gradient of {name} after step {step}")


@on_grids
@given(data=st.data())
@pytest.mark.operator(
    "nn.BatchNorm1d/2d/3d, nn.InstanceNorm1d/2d/3d", "running statistics, momentum=None, train and eval"
)
def test_running_statistics(mesh: Mesh, data: st.DataObject, pools: Any) -> None:
    shape = shapes(mesh, data)
    kind = data.draw(st.sampled_from(list(MODULES)))
    options = {
        "affine": data.draw(st.booleans()),
        "track_running_stats": data.draw(st.sampled_from([True, True, False])),
    }
    momentum = data.draw(st.sampled_from([0.1, 0.7, *([None] if kind == "batch" else [])]))
    module = MODULES[kind][len(shape) - 3](shape[1], momentum=momentum, **options)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    pools[mesh.size].run(train_then_evaluate, module, mesh, shape, dtype)


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=3)], ids=str)
def test_batch_norm_of_vectors(mesh: Mesh, pools: Any) -> None:
    pools[mesh.size].run(train_then_evaluate, nn.BatchNorm1d(5), mesh, (4, 5), torch.float64)


def half_precision(mesh: Mesh) -> None:
    """bfloat16 data with float32 parameters and statistics, as in mixed precision."""
    x = (torch.randn(4, 3, 40, 40, generator=torch.Generator().manual_seed(0)) + 5).bfloat16()
    module = nn.BatchNorm2d(3)
    expected = F.batch_norm(x.float(), None, None, module.weight, module.bias, training=True)
    sharded = shard(x, opened(mesh), {0: "data", 2: "height"})
    result = module(sharded)
    assert_close(result.local, expected[sharded.box.slices()].bfloat16(), expected, "output")
    mean = x.double().mean((0, 2, 3))
    assert_close(module.running_mean, (0.1 * mean).float(), mean, "running mean")  # type: ignore[arg-type]
    result.local.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


def test_statistics_of_half_precision_data_are_float32(pools: Any) -> None:
    pools[4].run(half_precision, Mesh(data=2, height=2))


def saved_elements(mesh: Mesh) -> tuple[int, dict[str, int], dict[str, int]]:
    """Elements kept for the backward pass, and the collectives of each direction."""
    x = torch.randn(2, 3, 32, 32)
    sharded = shard(x, opened(mesh), {2: "height"})
    leaf = sharded.local.requires_grad_()
    kept: dict[int, int] = {}
    pack = partial(_note, kept)
    with opened(mesh).traffic.watch() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = nn.BatchNorm2d(3)(sharded.like(leaf))
    with opened(mesh).traffic.watch() as backward:
        y.local.sum().backward()
    return sum(kept.values()), dict(forward.calls), dict(backward.calls)


def _note(kept: dict[int, int], tensor: torch.Tensor) -> torch.Tensor:
    kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
    return tensor


def test_batch_norm_keeps_only_its_input_and_reduces_once_each_way(pools: Any) -> None:
    for elements, forward, backward in pools[2].run(saved_elements, Mesh(height=2)):
        assert 2 * 3 * 16 * 32 < elements < 2 * 3 * 16 * 32 + 100
        assert forward == {"all_reduce": 1}
        assert backward == {"all_reduce": 2}, "one for the averages, one for the parameters' gradients"


def refusals(mesh: Mesh) -> None:
    x = replicated(torch.randn(1, 6, 1), opened(mesh))
    with pytest.raises(UnsupportedError, match=r"`num_groups` \(=4\) must divide the 6 channels"):
        F.group_norm(x, 4)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"`running_mean` and `running_var` \(=None\) must both be given"):
        F.batch_norm(x, None, None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"`normalized_shape` \(=\(6,\)\) must be the last dims"):
        F.layer_norm(x, (6,))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="`normalize`: `out=` has no split version"):
        F.normalize(x, out=torch.empty(1))  # type: ignore[arg-type]
    for norm in (nn.BatchNorm1d(6), nn.InstanceNorm1d(6), nn.GroupNorm(6, 6)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            norm(x)


def test_refusals(pools: Any) -> None:
    pools[1].run(refusals, Mesh())
