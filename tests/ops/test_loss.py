"""Losses: global means and sums, and the gradients that `loss.backward()` gives."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convmesh import Mesh, OpenMesh, UnsupportedError, shard
from convmesh.dist import Traffic, dry_mesh
from convmesh.ops import dice_loss
from convmesh.testing import SplitCase, natural_cut, opened
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.conftest import Pools
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]
Shape = tuple[int, ...]

REDUCTIONS = ("mean", "sum", "none")
MODULES: dict[str, Any] = {
    "mse_loss": nn.MSELoss,
    "l1_loss": nn.L1Loss,
    "smooth_l1_loss": nn.SmoothL1Loss,
    "huber_loss": nn.HuberLoss,
    "binary_cross_entropy_with_logits": nn.BCEWithLogitsLoss,
}


def regression(x: Any, target: Any, weight: Any = None, name: str = "", **options: Any) -> Any:
    return getattr(F, name)(x, target, **options, **({} if weight is None else {"weight": weight}))


def regression_module(x: Any, target: Any, name: str, **options: Any) -> Any:
    return MODULES[name](**options)(x, target)


def binary(x: Any, target: Any, weight: Any, positive: Any, reduction: str, logits: bool) -> Any:
    # Factors that learn are refused by torch.
    weight, target = weight.detach().abs(), torch.sigmoid(target)
    if not logits:
        return F.binary_cross_entropy(torch.sigmoid(x), target, weight, reduction=reduction)
    options = {"weight": weight, "pos_weight": positive.detach().abs(), "reduction": reduction}
    return F.binary_cross_entropy_with_logits(x, target, **options)


def classes_of(x: Any, labels: Any, weight: Any = None, module: bool = False, log: bool = False, **options: Any) -> Any:
    weight = None if weight is None else weight.detach().abs()
    if module:
        return (nn.NLLLoss if log else nn.CrossEntropyLoss)(weight, **options)(x, labels)
    return (F.nll_loss if log else F.cross_entropy)(x, labels, weight, **options)


def soft_classes(x: Any, target: Any, weight: Any = None, **options: Any) -> Any:
    return F.cross_entropy(x, target, weight, **options)


def with_plain_target(x: Any, shape: Shape, classes: int) -> Any:
    """The target is a plain tensor that every rank has whole."""
    target = torch.randint(classes, shape, generator=torch.Generator().manual_seed(0))
    return F.cross_entropy(x, target, ignore_index=0) + dice_loss(x, target, activation="softmax")


def draw_shape(mesh: Mesh, data: st.DataObject, channels: int) -> Shape:
    return (data.draw(batch_sizes(mesh)), channels, *data.draw(extents(data.draw(spatial_dims(mesh)), largest=9)))


def without_classes(mesh: Mesh, shape: Shape) -> tuple[Shape, dict[int, str]]:
    """Class indices for scores of `shape`, cut as these are."""
    cut = natural_cut(mesh, len(shape))
    return (shape[0], *shape[2:]), {dim - (dim > 0): axis for dim, axis in cut.items()}


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("mse_loss, l1_loss, smooth_l1_loss, huber_loss", "every reduction, weight, beta, delta")
def test_regression(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    name = data.draw(st.sampled_from([n for n in MODULES if n != "binary_cross_entropy_with_logits"]))
    shape = draw_shape(mesh, data, 2)
    options: dict[str, Any] = {"reduction": data.draw(st.sampled_from(REDUCTIONS))}
    scale = {"smooth_l1_loss": "beta", "huber_loss": "delta"}.get(name)
    options |= {scale: data.draw(st.sampled_from([0.5, 1.0, 2.0]))} if scale else {}
    weighted = name != "smooth_l1_loss" and data.draw(st.booleans())
    fn = regression if weighted or data.draw(st.booleans()) else regression_module
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    check(SplitCase(partial(fn, name=name, **options), mesh, (shape,) * (2 + weighted), dtype=dtype))


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("binary_cross_entropy, … with_logits", "every reduction, weight, pos_weight")
def test_binary(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(mesh, data, 3)
    weight = shape if data.draw(st.booleans()) else (shape[0], *[1] * (len(shape) - 1))
    positive = (3, *[1] * (len(shape) - 2))
    fn = partial(binary, reduction=data.draw(st.sampled_from(REDUCTIONS)), logits=data.draw(st.booleans()))
    check(SplitCase(fn, mesh, (shape, shape, weight), (positive,)))


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator(
    "cross_entropy, nll_loss", "indices and probabilities, weight, ignore_index, label_smoothing, every reduction"
)
def test_class_indices(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(mesh, data, 4)
    labels, cut = without_classes(mesh, shape)
    log = data.draw(st.booleans())
    options: dict[str, Any] = {"reduction": data.draw(st.sampled_from(REDUCTIONS))}
    options["ignore_index"] = data.draw(st.sampled_from([-100, 0, 2]))
    options |= {} if log else {"label_smoothing": data.draw(st.sampled_from([0.0, 0.2]))}
    params = ((4,),) if data.draw(st.booleans()) else ()
    fn = partial(classes_of, log=log, module=data.draw(st.booleans()), **options)
    cuts = (natural_cut(mesh, len(shape)), cut if data.draw(st.booleans()) else natural_cut(mesh, len(labels)))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    case = SplitCase(fn, mesh, (shape, labels), params, dtype, frozenset({1}), classes=4, cuts=cuts)
    check(case)


@pytest.mark.parametrize("mesh", [Mesh(filter=2), Mesh(filter=3), Mesh(data=2, filter=2)], ids=str)
@draws(8)
@given(data=st.data())
def test_many_classes_stay_cut(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    classes = data.draw(st.integers(10, 13))
    shape = (data.draw(batch_sizes(mesh)), classes, *data.draw(extents(data.draw(st.integers(0, 2)), largest=4)))
    by_samples = {0: "data"} if "data" in mesh.axes else {}
    options: dict[str, Any] = {"reduction": data.draw(st.sampled_from(REDUCTIONS))}
    options |= {"label_smoothing": data.draw(st.sampled_from([0.0, 0.2]))}
    params = ((classes,),) if data.draw(st.booleans()) else ()
    if data.draw(st.booleans()):
        cuts: Any = ({1: "filter", **by_samples}, by_samples)
        check(SplitCase(partial(soft_classes, **options), mesh, (shape, shape), params, cuts=cuts))
        return
    log = data.draw(st.booleans())
    options |= {"ignore_index": data.draw(st.sampled_from([-100, 0, 2]))}
    fn = partial(classes_of, log=log, **{k: v for k, v in options.items() if not log or k != "label_smoothing"})
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    cuts = ({1: "filter", **by_samples}, {} if data.draw(st.booleans()) else by_samples)
    shapes = (shape, (shape[0], *shape[2:]))
    check(SplitCase(fn, mesh, shapes, params, dtype, frozenset({1}), classes=classes, cuts=cuts))


def vocabulary_traffic(mesh: OpenMesh) -> Traffic:
    x = shard(torch.zeros(4, 1000, dtype=torch.float64, device=mesh.device), mesh, {1: "filter"})
    x.requires_grad = True
    with mesh.traffic.watch() as sent:
        F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=mesh.device)).backward()  # type: ignore[arg-type]
    return sent


def real_vocabulary_traffic() -> Traffic:
    return vocabulary_traffic(opened(Mesh(filter=2)))


def test_no_score_of_a_cut_vocabulary_travels(pools: Pools) -> None:
    real = pools[2].run(real_vocabulary_traffic)
    assert [vocabulary_traffic(dry_mesh(Mesh(filter=2), rank)) for rank in range(2)] == real
    assert real[0].bytes_total < 4 * 4 * 8


@on_grids
@draws(10)
@given(data=st.data())
def test_class_probabilities(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(mesh, data, 3)
    smoothing = data.draw(st.sampled_from([0.0, 0.2]))
    fn = partial(soft_classes, reduction=data.draw(st.sampled_from(REDUCTIONS)), label_smoothing=smoothing)
    check(SplitCase(fn, mesh, (shape, shape), ((3,),) if data.draw(st.booleans()) else ()))


@on_grids
@given(data=st.data())
def test_flat_classes_and_all_ignored(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    samples = data.draw(st.integers(1, 5))
    cuts: Any = ({0: "data"} if "data" in mesh.axes else {},) * 2
    options: dict[str, Any] = {"label_smoothing": data.draw(st.sampled_from([0.0, 0.1]))}
    options["ignore_index"] = data.draw(st.sampled_from([0, 1]))
    params = ((3,),) if data.draw(st.booleans()) else ()
    shapes = ((samples, 3), (samples,))
    # One class is drawn: it is ignored or not. All ignored gives nan, and gradients of zero.
    fn = partial(classes_of, **options)
    check(SplitCase(fn, mesh, shapes, params, integer_inputs=frozenset({1}), classes=1, cuts=cuts))


@on_grids
@given(data=st.data())
def test_plain_targets(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(mesh, data, 3)
    check(SplitCase(partial(with_plain_target, shape=without_classes(mesh, shape)[0], classes=3), mesh, (shape,)))


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("dice_loss", "softmax, sigmoid, over samples or the batch, background, ignore_index")
def test_dice(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(mesh, data, 3)
    labels, cut = without_classes(mesh, shape)
    soft = data.draw(st.booleans())
    options: dict[str, Any] = {
        "activation": data.draw(st.sampled_from(["softmax", "sigmoid"])),
        "batch": data.draw(st.booleans()),
        "include_background": data.draw(st.booleans()),
        "smooth": data.draw(st.sampled_from([1e-5, 1.0])),
        "ignore_index": None if soft else data.draw(st.sampled_from([None, 1])),
    }
    cuts = (natural_cut(mesh, len(shape)), natural_cut(mesh, len(shape)) if soft else cut)
    integers = frozenset({1})
    target = shape if soft else labels
    fn = partial(dice_loss, **options)
    check(SplitCase(fn, mesh, (shape, target), integer_inputs=integers, classes=2 if soft else 3, cuts=cuts))


def test_dice_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (2, 4, 5), generator=generator)
    p, t = logits.softmax(1).flatten(2), F.one_hot(labels, 3).movedim(-1, 1).flatten(2).double()
    each = 1 - (2 * (p * t).sum(2) + 0.5) / (p.sum(2) + t.sum(2) + 0.5)
    torch.testing.assert_close(dice_loss(logits, labels, activation="softmax", smooth=0.5), each.mean())
    torch.testing.assert_close(
        dice_loss(logits, labels, activation="softmax", smooth=0.5, include_background=False), each[:, 1:].mean()
    )
    batch = 1 - (2 * (p * t).sum((0, 2)) + 0.5) / (p.sum((0, 2)) + t.sum((0, 2)) + 0.5)
    torch.testing.assert_close(dice_loss(logits.softmax(1), labels, batch=True, smooth=0.5), batch.mean())
    labels[0, 0], p[0, :, :5], t[0, :, :5] = 9, 0, 0
    each = 1 - (2 * (p * t).sum(2) + 0.5) / (p.sum(2) + t.sum(2) + 0.5)
    torch.testing.assert_close(dice_loss(logits, labels, activation="softmax", smooth=0.5, ignore_index=9), each.mean())


def _in_half_precision(dtype: torch.dtype) -> None:
    mesh = opened(Mesh(height=2))
    whole = torch.full((1, 2, 400, 400), 3.0, dtype=dtype)
    x: Any = shard(whole, mesh, {2: "height"})
    found: Any = F.mse_loss(x, torch.zeros_like(whole))
    assert (found.dtype, found.item()) == (dtype, 9.0)
    found = F.cross_entropy(x, torch.zeros(1, 400, 400, dtype=torch.long))
    torch.testing.assert_close(found.item(), 0.6931, atol=2e-3, rtol=0)
    found = dice_loss(x, torch.zeros(1, 400, 400, dtype=torch.long), activation="softmax")
    torch.testing.assert_close(found.item(), 1 - (2 / 3) / 2, atol=3e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_do_not_overflow(dtype: torch.dtype, pools: Pools) -> None:
    pools[2].run(_in_half_precision, dtype)


def _whole_loss() -> None:
    """The loss is one number, the same on every rank, and goes backward as it is."""
    mesh = opened(Mesh(data=2))
    whole = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 3, 0])
    x: Any = shard(whole, mesh, {0: "data"})
    x.local.requires_grad_()
    loss: Any = F.cross_entropy(x, labels)
    loss.backward()
    expected = F.cross_entropy(leaf := whole.clone().requires_grad_(), labels)
    expected.backward()
    assert tuple(loss.shape) == ()
    torch.testing.assert_close(float(loss), expected.item())
    assert leaf.grad is not None
    torch.testing.assert_close(x.local.grad, leaf.grad[x.box.slices()])


def test_backward_from_the_loss(pools: Pools) -> None:
    pools[2].run(_whole_loss)


def _broadcast_target() -> None:
    """Torch warns of a target of another shape and broadcasts it; so do shards."""
    whole, target = torch.arange(24.0).view(2, 3, 4), torch.arange(3.0).view(1, 3, 1)
    x: Any = shard(whole, opened(Mesh(height=2)), {2: "height"})
    with pytest.warns(UserWarning, match="different to the input size"):
        found, expected = F.mse_loss(x, target).item(), F.mse_loss(whole, target).item()
    assert found == pytest.approx(expected)


def test_broadcast_target(pools: Pools) -> None:
    pools[2].run(_broadcast_target)


def _refusals() -> None:
    mesh = opened(Mesh(height=2))
    x: Any = shard(torch.zeros(2, 3, 4), mesh, {2: "height"})
    labels = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(UnsupportedError, match=r"`mse_loss` with reduction='batchmean', .* 'mean', 'sum' or 'none'"):
        F.mse_loss(x, x, reduction="batchmean")
    with pytest.raises(UnsupportedError, match=r"`cross_entropy` with .* size_average=False"):
        F.cross_entropy(x, labels, size_average=False)
    with pytest.raises(ValueError, match=r"`target` \(torch.int64, \(2, 3\)\) .* of shape \(2, 4\), or a value"):
        F.cross_entropy(x, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"`target` \(torch.int32, \(2, 4\)\) must hold class indices: torch.int64"):
        F.nll_loss(x, labels.int())
    with pytest.raises(UnsupportedError, match=r"`input` has shape \(4,\), .* needs samples: \(N, C, …\)"):
        F.cross_entropy(shard(torch.zeros(4), mesh, {0: "height"}), torch.tensor(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`target` has shape \(2, 3, 1\), .* the input's shape, \(2, 3, 4\)"):
        F.binary_cross_entropy_with_logits(x, torch.zeros(2, 3, 1))
    with pytest.raises(ValueError, match=r"`l1_loss`: `weight` has shape \(4,\)"):
        F.l1_loss(x, x, weight=torch.zeros(4))  # type: ignore[call-arg]
    with pytest.raises(UnsupportedError, match=r"`activation` \(='tanh'\) must be one of none, sigmoid, softmax"):
        dice_loss(x, labels, activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"`ignore_index` \(=0\) .* class indices"):
        dice_loss(x, x, ignore_index=0)
    with pytest.raises(UnsupportedError, match="`target` is Sharded, but `input` is not"):
        dice_loss(torch.zeros(2, 3, 4), x)
    with pytest.raises(UnsupportedError, match="the only class of `input` is the background"):
        dice_loss(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), include_background=False)


def test_refusals(pools: Pools) -> None:
    pools[2].run(_refusals)


def _under_autocast() -> None:
    scores = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(4)
    cut: Any = shard(scores, opened(Mesh(channel=2)), {1: "channel"})
    with torch.autocast("cpu", torch.bfloat16):
        expected, loss = F.cross_entropy(scores, labels), cast("Any", F.cross_entropy(cut, labels))
    found = loss.gather()
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_cut_classes_are_as_precise_under_autocast_as_whole_ones(pools: Pools) -> None:
    pools[2].run(_under_autocast)
