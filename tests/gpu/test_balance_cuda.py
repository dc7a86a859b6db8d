"""The meter of a balancer on a GPU: it times what the device does, and waits for it once a decision."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.balance.busy_meter import BusyMeter
from convmesh.dist.stamps import DeviceClock, clock_for
from convmesh.testing import run_ranks
from tests.gpu.conftest import Ranks

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

CYCLES = 20_000_000
"""About ten milliseconds of a GPU that waits."""


def metered() -> tuple[list[float], list[float]]:
    """Steps that keep the GPU busy for one, three and two pauses; and how long each kept the host."""
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, DeviceClock)
    meter, host = BusyMeter(clock), []
    torch.cuda._sleep(CYCLES)
    for pauses in (1, 3, 2):
        begin = clock_for(torch.device("cpu")).stamp()
        meter.begin()
        torch.cuda._sleep(pauses * CYCLES)
        meter.end()
        host.append(clock_for(torch.device("cpu")).stamp() - begin)
    return meter.taken(), host


def test_steps_are_timed_by_the_device_and_the_host_runs_ahead() -> None:
    ((device, host),) = run_ranks(1, metered, seconds_timeout=240)
    assert device[1] == pytest.approx(3 * device[0], rel=0.2)
    assert device[2] == pytest.approx(2 * device[0], rel=0.2)
    assert max(host[1:]) < 0.5 * device[0]  # the first step waits for what was queued before


def shares_of(slow: int) -> dict[str, tuple[int, ...]]:
    """What two ranks have in the end, of which one keeps its GPU three times as long for a sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 3, 3, padding=1))
    x = torch.randn(16, 1, 16, 16)
    target = (x[:, 0] > 0).long()
    mesh = cm.open_mesh(Mesh(data=2), device="cuda")

    def loss(output: cm.Sharded, goal: torch.Tensor) -> torch.Tensor:
        samples = output.local.shape[0]
        torch.cuda._sleep(samples * CYCLES // 4 * (3 if mesh.rank == slow else 1))
        return F.cross_entropy(output, goal)  # type: ignore[arg-type]

    net = cm.parallelize(model, cm.plan(model, x, Mesh(data=2), "data"), loss, mesh=mesh)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    balancer = cm.Balancer(net)
    for _ in range(30):
        with balancer.step():
            net(net.shard_input(x.cuda()), net.shard_target(target.cuda())).backward()
            opt.step()
            opt.zero_grad()
    return balancer.shares


def test_samples_leave_the_rank_whose_gpu_is_slower(ranks: Ranks) -> None:
    """Ranks that share a GPU take turns on it, which slows both alike."""
    found = ranks(2).run(shares_of, 1)
    assert found[0] == found[1]
    assert found[0]["data"][0] > found[0]["data"][1]
