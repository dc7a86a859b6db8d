"""A pipeline is used like any other split network: gradients, optimisers, other batches, states, meta models."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import NonFiniteLossError, PlanError
from tests.conftest import Pools
from tests.runtime.pipelines import HEIGHT, Small, gradients_of, largest, small, split, worst


def accumulated() -> float:
    """Two batches, the first under `no_sync`, the second counted double."""
    reference, x, target = small()
    for factor in (1.0, 2.0):
        (factor * F.cross_entropy(reference(x), target)).backward()
    net = split(small()[0], Mesh(pipe=2, data=2), F.cross_entropy)
    shards = net.shard_input(x), net.shard_target(target)
    with net.no_sync():
        net(*shards).backward()
    (2.0 * net(*shards)).backward()
    error = worst(net.full_gradients(), gradients_of(reference))
    norm = cm.clip_grad_norm_(net.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    return max(error, float((norm - expected).abs()), worst(net.full_gradients(), gradients_of(reference)))


def test_gradients_accumulate_scale_and_are_clipped_over_all_stages(pools: Pools) -> None:
    assert largest(pools[4].run(accumulated)) < 1e-10


def stepped(reduction: str) -> float:
    """Weights after optimiser steps, with gradients summed over `data` in the given way."""
    reference, x, target = small()
    net = split(small()[0], Mesh(pipe=2, data=2), F.cross_entropy, reduction=reduction)
    whole, mine = torch.optim.AdamW(reference.parameters()), net.optimizer(torch.optim.AdamW)
    for _ in range(2):
        whole.zero_grad()
        mine.zero_grad()
        F.cross_entropy(reference(x), target).backward()
        net(net.shard_input(x), net.shard_target(target)).backward()
        whole.step()
        mine.step()
    return worst(net.full_state_dict(), dict(reference.state_dict()))


@pytest.mark.parametrize("reduction", ["bucketed", "sharded", "broadcast"])
def test_optimisers_see_the_gradients_however_they_are_summed(pools: Pools, reduction: str) -> None:
    assert largest(pools[4].run(stepped, reduction)) < 1e-10


def error_in_bfloat16() -> tuple[float, float]:
    """The error of the loss, and of gradients relative to the largest, with autocast on both sides."""
    reference, x, target = small()
    reference, x = reference.float(), x.float()
    net = split(small()[0].float(), Mesh(pipe=2), F.cross_entropy)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(reference(x), target)
        loss = net(net.shard_input(x), net.shard_target(target))
    expected.backward()
    loss.backward()
    gradients = gradients_of(reference)
    scale = max(float(g.abs().max()) for g in gradients.values())
    return abs(float(loss.item() - expected.item())), worst(net.full_gradients(), gradients) / scale


def test_autocast_goes_through_stages(pools: Pools) -> None:
    for of_loss, of_gradients in pools[2].run(error_in_bfloat16):
        assert of_loss < 1e-3
        assert of_gradients < 1e-2


def other_batches() -> float:
    """Batches of other sizes than the plan's, with gradients and without, and outputs on every rank."""
    reference, x, target = small(samples=11)
    net = split(small()[0], Mesh(pipe=2, data=2), F.cross_entropy)
    errors = []
    for samples in (8, 6, 7, 11):
        a, b = x[:samples], target[:samples]
        reference.zero_grad()
        net.zero_grad()
        F.cross_entropy(reference(a), b).backward()
        net(net.shard_input(a), net.shard_target(b)).backward()
        errors.append(worst(net.full_gradients(), gradients_of(reference)))
    net.eval()
    for samples in (8, 6):
        a, b = x[:samples], target[:samples]
        y = net.gather_output(net(net.shard_input(a)))
        with torch.no_grad():
            loss = net(net.shard_input(a), net.shard_target(b))
            expected = reference(a)
            errors += [float((y - expected).abs().max()), float((loss - F.cross_entropy(expected, b)).abs())]
    return max(errors)


def test_other_numbers_of_samples_and_evaluation(pools: Pools) -> None:
    assert largest(pools[4].run(other_batches)) < 1e-10


def held_weights() -> tuple[set[str], bool, bool]:
    """The names of this rank's parameters; whether the program counts their bytes; whether the state comes back."""
    model, _, _ = small()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    net = split(model, Mesh(pipe=2), F.cross_entropy, schedule="interleaved")
    counts = net.program.bytes_weights == sum(p.nbytes for p in net.parameters())
    changed = {name: tensor + 1 for name, tensor in state.items()}
    net.load_full_state_dict(changed)
    back = net.full_state_dict()
    same = list(back) == list(state) and all(torch.equal(back[name], changed[name]) for name in state)
    return {name for name, _ in net.named_parameters()}, counts, same


def test_a_rank_holds_only_its_stages_weights(pools: Pools) -> None:
    (first, *of_first), (second, *of_second) = pools[2].run(held_weights)
    assert of_first == of_second == [True, True]
    assert first
    assert second
    assert not first & second
    assert first | second == {name for name, _ in Small().named_parameters()}


def drawn_on_meta(mesh: Mesh) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Small().double()
    strategy = "pipeline" if "pipe" in mesh.axes else "data"
    net = cm.parallelize(model, cm.plan(model, (8, 2, 8, 8), mesh, strategy), loss=F.cross_entropy)
    net.reset_parameters(3)
    assert "pipe" not in mesh.axes or len(list(net.parameters())) < len(list(Small().parameters()))
    _, x, target = small()
    net(net.shard_input(x), net.shard_target(target)).backward()
    return net.full_state_dict() | {f"{name}.grad": grad for name, grad in net.full_gradients().items()}


def test_a_meta_model_gets_memory_only_for_its_stages(pools: Pools) -> None:
    staged, whole = pools[2].run(drawn_on_meta, Mesh(pipe=2))[0], pools[1].run(drawn_on_meta, Mesh())[0]
    assert worst(staged, whole) < 1e-10


def losses_with_dropout(axes: dict[str, int]) -> list[float]:
    model, x, target = small(dropout=0.5)
    net = split(model, Mesh(**axes), F.cross_entropy, HEIGHT if "height" in axes else None)
    return [net(net.shard_input(x), net.shard_target(target)).item() for _ in range(2)]


def test_masks_differ_by_step_and_not_by_how_stages_are_cut(pools: Pools) -> None:
    (first, second), _ = pools[2].run(losses_with_dropout, {"pipe": 2})
    assert first != second
    for losses in pools[4].run(losses_with_dropout, {"pipe": 2, "height": 2}):
        assert losses == pytest.approx([first, second], rel=1e-12)


def not_a_number() -> str:
    model, x, target = small()
    net = split(model, Mesh(pipe=2), F.cross_entropy)
    x[3, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteLossError) as caught:
        net(net.shard_input(x), net.shard_target(target))
    return str(caught.value)


def test_a_loss_that_is_not_a_number_is_reported_everywhere(pools: Pools) -> None:
    assert all("rank 1 are not finite" in told for told in pools[2].run(not_a_number))


def test_a_mesh_with_a_pipe_axis_needs_stages(pools: Pools) -> None:
    model, _, _ = small()
    plan = cm.plan(model, (8, 2, 8, 8), Mesh(pipe=2), "pipeline")
    with pytest.raises(PlanError, match=r"no \[pipeline\]"):
        cm.parallelize(model, replace(plan, pipeline=None), mesh=cm.dry_mesh(Mesh(pipe=2)))
