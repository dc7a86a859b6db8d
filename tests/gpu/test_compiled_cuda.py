"""Compiled steps on a GPU: ranks that share one device train as eagerly, and a user can capture a compiled step."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import convmesh as cm
from convmesh import Mesh
from convmesh.runtime.compiled.step_calls import StepCall
from convmesh.testing import RankPool, run_ranks
from tests.gpu.conftest import SECONDS_TIMEOUT, Ranks

from .test_parallelize_cuda import MESHES, network, replayed, steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]


def split(mesh: Mesh, strategy: str, compiling: bool) -> tuple[list[float], list[str]]:
    model, x, target, loss_of = network(torch.float64)
    opened = cm.open_mesh(mesh, device="cuda")
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy), loss_of, mesh=opened, compile=compiling)
    args = net.shard_input(x), net.shard_target(target)
    return steps(net, lambda: net(*args)), getattr(net._running.engine, "told", [])


@pytest.mark.parametrize(("mesh", "strategy"), MESHES, ids=str)
def test_losses_are_those_of_eager_steps(mesh: Mesh, strategy: str, ranks: Ranks) -> None:
    pool = ranks(mesh.size)
    eager, compiled = (pool.run(split, mesh, strategy, compiling) for compiling in (False, True))
    for (expected, _), (found, told) in zip(eager, compiled, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-9)
        assert told == []


def captured() -> tuple[Any, Any]:
    """Eager losses, and those of a compiled step that is captured in a CUDA graph."""
    dist.destroy_process_group()
    cm.init()
    found = []
    for compiling in (False, True):
        model, x, target, loss_of = network(torch.float64)
        net = cm.parallelize(model, cm.plan(model, x, Mesh()), loss_of, compile=compiling)
        args = net.shard_input(x), net.shard_target(target)
        found.append(replayed(net, args) if compiling else steps(net, lambda net=net, args=args: net(*args), 4))
    return found[0], found[1]


def test_a_compiled_step_can_be_captured() -> None:
    ((eager, compiled),) = run_ranks(1, captured, seconds_timeout=280)
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-9, atol=1e-9)


def accumulated(mesh: Mesh, strategy: str, compiling: bool) -> tuple[list[torch.Tensor], bool]:
    """Losses and weights of steps that accumulate, change the batch, scale the loss and overlap; whether by graphs."""
    model, x, target, loss_of = network(torch.float64)
    opened = cm.open_mesh(mesh, device="cuda")
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy), loss_of, mesh=opened, compile=compiling)
    args = net.shard_input(x), net.shard_target(target)
    other = net.shard_input(x.flip(0) * 2), net.shard_target(target)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []

    def backward(loss: torch.Tensor, scale: float = 1.0) -> None:
        losses.append(loss.detach().cpu())
        (loss * scale).backward()

    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        with net.no_sync():
            backward(net(*args))
        backward(net(*other), 0.5)
        optimizer.step()
    first, second = net(*args), net(*other)  # two steps at once
    backward(first)
    backward(second)
    optimizer.step()
    for tensor in net.parameters():
        tensor.data = tensor.data.clone()  # weights that move are found again
    backward(net(*args))
    kept = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    made = [s._graphed._graphs for s in getattr(net._running.engine, "_steps", {}).values() if s is not None]
    state = [v.detach().cpu() for v in net.full_state_dict().values()]
    return [*losses, *(getattr(g, "_local_tensor", g).cpu() for g in kept), *state], any(g is not None for g in made)


@pytest.mark.parametrize(("mesh", "strategy"), [(Mesh(), "data"), *MESHES], ids=str)
def test_captured_steps_accumulate_overlap_and_follow_weights(
    mesh: Mesh, strategy: str, ranks: Ranks, backend: str
) -> None:
    pool = ranks(mesh.size)
    eager, compiled = (pool.run(accumulated, mesh, strategy, compiling) for compiling in (False, True))
    for (expected, _), (found, by_graphs) in zip(eager, compiled, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        assert by_graphs == (mesh.size == 1 or backend == "nccl")


def waits_for_the_gpu(arguments: list[Any]) -> list[Any]:
    """A call that cannot be captured."""
    torch.cuda.synchronize()
    return arguments


def interrupted(mesh: Mesh, where: str) -> tuple[list[torch.Tensor], list[str]]:
    """Losses, weights and running statistics of steps, one part of which turns out to wait for the GPU."""
    model, x, target, loss_of = network(torch.float64)
    opened = cm.open_mesh(mesh, device="cuda")
    net = cm.parallelize(model, cm.plan(model, x, mesh, "data"), loss_of, mesh=opened, compile=bool(where))
    args = net.shard_input(x), net.shard_target(target)
    losses = steps(net, lambda: net(*args), 2)
    warnings.simplefilter("ignore")  # the line that says why; `told` has it
    if where:
        (step,) = net._running.engine._steps.values()  # type: ignore[attr-defined]
        parts = [step._calls.forward, *(piece.calls for piece in step._calls.pieces)]
        parts[0 if where == "forward" else -1].insert(0, StepCall(waits_for_the_gpu, (), ()))
    losses += steps(net, lambda: net(*args), 3)
    state = [v.detach().cpu() for v in net.full_state_dict().values()]
    return [torch.tensor(losses), *state], getattr(net._running.engine, "told", [])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_cannot_be_captured_goes_on_without_graphs(where: str, backend: str) -> None:
    """Ranks of their own: what a broken capture leaves behind is not for other tests."""
    with RankPool(2, seconds_timeout=SECONDS_TIMEOUT, backend=backend) as pool:
        eager, compiled = (pool.run(interrupted, Mesh(data=2), part) for part in ("", where))
    for (expected, _), (found, told) in zip(eager, compiled, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        assert [("CUDA graph" in line) for line in told] == ([True] if backend == "nccl" else [])
