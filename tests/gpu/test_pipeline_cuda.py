"""Pipelines with stages on a GPU: values between stages go through the host, over Gloo."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import convmesh as cm
from convmesh import Mesh
from convmesh.testing import opened
from tests.gpu.conftest import Ranks
from tests.runtime.pipelines import gradients_of, small, worst

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


def error(mesh: Mesh, schedule: str, compiling: bool) -> float:
    """The error of gradients, loss and outputs on GPUs against one CPU with the whole batch."""
    reference, x, target = small()
    expected = F.cross_entropy(reference(x), target)
    expected.backward()
    model = small()[0]
    strategy = "data+pipeline" if "data" in mesh.axes else "pipeline"
    plan = cm.plan(model, tuple(x.shape), mesh, strategy, microbatches=2, schedule=schedule)  # type: ignore[arg-type]
    net = cm.parallelize(model, plan, loss=F.cross_entropy, mesh=opened(mesh, "cuda"), compile=compiling)
    net(net.shard_input(x), net.shard_target(target)).backward()  # compiled stages are replayed from here on
    net.zero_grad()
    loss = net(net.shard_input(x), net.shard_target(target))
    loss.backward()
    assert all(p.is_cuda for p in net.parameters())
    assert net._running.engine.told == []  # type: ignore[attr-defined]
    found = {name: grad.cpu() for name, grad in net.full_gradients().items()}
    y = net.gather_output(net(net.shard_input(x))).cpu()
    with torch.no_grad():
        differences = [float((y - reference(x)).abs().max()), abs(float(loss.item() - expected.item()))]
    return max(*differences, worst(found, gradients_of(reference)))


@pytest.mark.parametrize("compiling", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mesh", [Mesh(pipe=2), Mesh(pipe=2, data=2)], ids=str)
def test_gradients_are_those_of_one_device(mesh: Mesh, compiling: bool, ranks: Ranks) -> None:
    for schedule in SCHEDULES:
        assert max(ranks(mesh.size).run(error, mesh, schedule, compiling)) < 1e-9, schedule
