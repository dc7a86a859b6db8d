"""Split networks on a GPU: ranks that share one device, mixed precision with scaling, CUDA graphs, torch.compile."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import convmesh as cm
from convmesh import Mesh, models
from convmesh.testing import run_ranks
from tests.gpu.conftest import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

MESHES = [
    (Mesh(data=2), "data"),
    (Mesh(data=2, height=2), "data+spatial"),
    (Mesh(filter=2), "filter"),
    (Mesh(data=2), "hybrid"),
]


def network(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor, Any]:
    torch.manual_seed(1)
    small = models.find("resnet18").small()
    generator = torch.Generator().manual_seed(2)
    x, target = small.draw_input(generator).to("cuda", dtype), small.draw_target(generator).cuda()
    return small.create().to("cuda", dtype), x, target, small.task.loss()


def steps(net: Any, loss_of: Any, count: int = 3) -> list[float]:
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(count):
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def whole() -> list[float]:
    model, x, target, loss_of = network(torch.float64)
    return steps(model, lambda: loss_of(model(x), target))


def split(mesh: Mesh, strategy: str) -> tuple[list[float], set[str]]:
    model, x, target, loss_of = network(torch.float64)
    opened = cm.open_mesh(mesh, device="cuda")
    net = cm.parallelize(model, cm.plan(model, x, mesh, strategy), loss=loss_of, mesh=opened)
    args = net.shard_input(x), net.shard_target(target)
    return steps(net, lambda: net(*args)), {p.device.type for p in net.full_state_dict().values()}


@pytest.mark.parametrize(("mesh", "strategy"), MESHES, ids=str)
def test_losses_are_those_of_one_process(mesh: Mesh, strategy: str, ranks: Ranks) -> None:
    (expected,) = run_ranks(1, whole, seconds_timeout=240)
    for losses, devices in ranks(mesh.size).run(split, mesh, strategy):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=1e-9)
        assert devices == {"cuda"}


def alone(kind: str) -> Any:
    """On NCCL and one rank: captured in a CUDA graph, in float16 with scaling, or compiled."""
    if kind == "compiled":
        warnings.simplefilter("ignore")  # torch's compiler warns about torch's own modules
        torch.backends.cudnn.allow_tf32 = False  # in four steps its rounding grows to 1e-3, and kernels differ
    dist.destroy_process_group()
    cm.init()
    model, x, target, loss_of = network(torch.float32)
    plain = steps(model, lambda: loss_of(model(x), target), 4)
    model, x, target, loss_of = network(torch.float32)
    net = cm.parallelize(model, cm.plan(model, x, Mesh()), loss=loss_of, compile=kind == "compiled")
    args = net.shard_input(x), net.shard_target(target)
    if kind == "graph":
        return plain, replayed(net, args)
    if kind == "float16":
        return plain, scaled(net, args)
    return plain, steps(net, lambda: net(*args), 4)


def replayed(net: Any, args: Any) -> list[float]:
    """The first step as usual, the others by replaying one graph."""
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []

    def step() -> torch.Tensor:
        opt.zero_grad(set_to_none=False)
        loss: torch.Tensor = net(*args)
        loss.backward()
        opt.step()
        return loss

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        losses.append(step().item())
    torch.cuda.current_stream().wait_stream(side)
    state = {n: v.clone() for n, v in net.state_dict().items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    assert all(torch.equal(v, state[n]) for n, v in net.state_dict().items()), "capturing runs nothing"
    for _ in range(3):
        graph.replay()
        losses.append(loss.item())
    return losses


def scaled(net: Any, args: Any) -> list[float]:
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    scaler = cm.GradScaler(init_scale=2.0**10)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(*args)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        net.clip_grad_norm_(1e6)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("kind", "tolerance"), [("graph", 2e-4), ("float16", 3e-2), ("compiled", 2e-4)])
def test_one_gpu_with_nccl(kind: str, tolerance: float) -> None:
    ((plain, found),) = run_ranks(1, alone, kind, seconds_timeout=280)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=tolerance, atol=tolerance)


def volume_of_256() -> Any:
    """A wide 3D layer in bfloat16 on a channels-last volume, forward and backward."""
    dist.destroy_process_group()
    cm.init()
    model = torch.nn.Sequential(
        torch.nn.Conv3d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(8, 1, 3, padding=1)
    )
    x = torch.randn(1, 1, 256, 256, 256)
    net = cm.parallelize(model, cm.plan(model, x, Mesh()), loss=F.mse_loss)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = net(net.shard_input(x), net.shard_target(x))
    loss.backward()
    return loss.item()


def test_a_volume_of_256() -> None:
    (loss,) = run_ranks(1, volume_of_256, seconds_timeout=240)
    assert 0.5 < loss < 2
