"""Gradients after backward are those of one device, in every scenario."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from convmesh import Mesh
from convmesh.gradients.reduction import GradientReducer
from convmesh.testing import RankPool, opened
from tests.gradients.partial_nets import MESHES, Towers, assert_same, batches, gradients

Pools = dict[int, RankPool]
NoSync = Callable[[], AbstractContextManager[None]]
SMALL: dict[str, Any] = {"bytes_bucket": 200, "bytes_first": 50}


def once(net: Towers, no_sync: NoSync) -> None:
    net(batches()[0]).backward()


def twice(net: Towers, no_sync: NoSync) -> None:
    for x in batches()[:2]:
        net(x).backward()


def after_zeroing(net: Towers, no_sync: NoSync) -> None:
    for i, x in enumerate(batches()):
        net.zero_grad(set_to_none=i % 2 == 0)
        net(x).backward()


def accumulated_apart(net: Towers, no_sync: NoSync) -> None:
    first, second, third, fourth = batches()
    net(first).backward()
    with no_sync():
        net(second).backward()
        net(third).backward()
    net(fourth).backward()


def accumulated_then_partly_used(net: Towers, no_sync: NoSync) -> None:
    """The last backward also sums partial gradients of parameters that it does not touch."""
    with no_sync():
        net(batches()[0]).backward()
    (net.fine(net.samples(batches()[1], ("data", "height"))).sum()).backward()


def partly_used_after_all(net: Towers, no_sync: NoSync) -> None:
    """Sums that the second backward does not touch stay as they are."""
    net(batches()[0]).backward()
    (net.fine(net.samples(batches()[1], ("data", "height"))).sum()).backward()


def same_graph_twice(net: Towers, no_sync: NoSync) -> None:
    loss = net(batches()[0])
    loss.backward(retain_graph=True)
    loss.backward()


def replaced_by_the_user(net: Towers, no_sync: NoSync) -> None:
    net(batches()[0]).backward()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone() * 2
    net(batches()[1]).backward()


def frozen_later(net: Towers, no_sync: NoSync) -> None:
    net.fine.requires_grad_(False)
    net(batches()[0]).backward()
    net.fine.requires_grad_(True)


def checkpointed(net: Towers, no_sync: NoSync) -> None:
    checkpoint(net, batches()[0], use_reentrant=False).backward()


def checkpointed_reentrant(net: Towers, no_sync: NoSync) -> None:
    """A backward inside backward; the first block of the network is the last to end."""
    x = batches()[0].requires_grad_()
    hidden = checkpoint(net.fine[:2], net.samples(x, ("data", "height")), use_reentrant=True)
    (net.fine[2:](hidden).square().sum() / len(x)).backward()


def shared_by_two_layers(net: Towers, no_sync: NoSync) -> None:
    x = net.samples(batches()[0], ("data", "height"))
    net.fine(torch.cat([net.fine(x), net.fine(x)], 1)[:, :5]).square().sum().backward()


def without_accumulating(net: Towers, no_sync: NoSync) -> None:
    """`autograd.grad` leaves the gradients alone."""
    net(batches()[0]).backward()
    torch.autograd.grad(net(batches()[1]), list(net.fine.parameters()))


SCENARIOS = [
    once, twice, after_zeroing, accumulated_apart, accumulated_then_partly_used, partly_used_after_all,
    same_graph_twice, replaced_by_the_user, frozen_later, checkpointed, checkpointed_reentrant, shared_by_two_layers,
    without_accumulating,
]  # fmt: skip


def alone() -> list[dict[str, Any]]:
    nets = [Towers(None) for _ in SCENARIOS]
    for net, scenario in zip(nets, SCENARIOS, strict=True):
        scenario(net, nullcontext)
    return [gradients(net) for net in nets]


def together(scenario: int, mesh: Mesh, options: dict[str, Any], at_once: bool) -> dict[str, Any]:
    net = Towers(opened(mesh))
    reducer = GradientReducer(opened(mesh), net.axes_of(), **options)
    for bucket in reducer.buckets:
        vars(bucket)["_copies_at_once"] = at_once  # as on a GPU
    SCENARIOS[scenario](net, reducer.no_sync)
    return gradients(net)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("scenario", range(len(SCENARIOS)), ids=lambda i: SCENARIOS[i].__name__)
@pytest.mark.parametrize(
    ("options", "at_once"), [(SMALL, False), (SMALL, True), ({}, False)], ids=["many", "copied at once", "one"]
)
def test_gradients_are_those_of_one_device(
    mesh: Mesh, scenario: int, options: dict[str, Any], at_once: bool, pools: Pools, expected: list[dict[str, Any]]
) -> None:
    for found in pools[mesh.size].run(together, scenario, mesh, options, at_once):
        assert_same(found, expected[scenario])


def watched_again(mesh: Mesh) -> list[dict[str, Any]]:
    """Gradients of the same two passes: watched once, and watched again before each of them."""
    grads = []
    for times in (0, 2):
        net = Towers(opened(mesh))
        reducer = GradientReducer(opened(mesh), net.axes_of(), **SMALL)
        for x in batches()[:2]:
            for _ in range(times):
                reducer.watch()
            net(x).backward()
        grads.append(gradients(net))
    return grads


def test_gradients_stay_the_same_to_the_bit_when_watched_again(pools: Pools) -> None:
    mesh = MESHES[1]
    for once_only, again in pools[mesh.size].run(watched_again, mesh):
        assert_same(again, once_only, most=0.0)


def hooks_left(mesh: Mesh) -> int:
    net = Towers(opened(mesh))
    reducer = GradientReducer(opened(mesh), net.axes_of(), **SMALL)
    reducer.watch()
    reducer.close()
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters())


def test_closing_takes_off_what_a_second_watch_put_on(pools: Pools) -> None:
    mesh = MESHES[1]
    assert pools[mesh.size].run(hooks_left, mesh) == [0] * mesh.size


@pytest.fixture(scope="module")
def expected(pools: Pools) -> list[dict[str, Any]]:
    grads: list[dict[str, Any]] = pools[1].run(alone)[0]
    return grads


def trained(mesh: Mesh | None, fused: bool) -> dict[str, Any]:
    net = Towers(None if mesh is None else opened(mesh))
    if mesh is not None:
        net.reducer = GradientReducer(opened(mesh), net.axes_of(), **SMALL)
    plain = [p for p in net.parameters() if p is not net.cut]
    optimizers = [torch.optim.AdamW(plain, lr=0.01, fused=fused), torch.optim.SGD([net.cut], 0.1, momentum=0.9)]
    for x in batches():
        net(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize("fused", [False, True])
def test_optimisers_take_the_gradients(fused: bool, pools: Pools) -> None:
    expected = pools[1].run(trained, None, fused)[0]
    for found in pools[4].run(trained, MESHES[2], fused):
        assert_same(found, expected)


class GivesNone(torch.autograd.Function):
    """An operator that says a weight has no gradient, though it learns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        del ctx, weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return grads[0], None


def gradients_with_none() -> list[torch.Tensor | None]:
    """Of two weights in one bucket, the second without a gradient in a later step."""
    first, second = (torch.nn.Parameter(torch.full((3,), value)) for value in (1.0, 2.0))
    reducer = GradientReducer(opened(Mesh(data=2)), [(first, ("data",)), (second, ("data",))])
    (first.sum() + second.sum()).backward()
    first.grad = second.grad = None
    GivesNone.apply(first, second).sum().backward()
    reducer.close()
    return [first.grad, second.grad]


def test_a_weight_whose_operator_gives_no_gradient_has_none(pools: Pools) -> None:
    for first, second in pools[2].run(gradients_with_none):
        assert torch.equal(first, torch.full((3,), 2.0))
        assert second is None
