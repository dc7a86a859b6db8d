"""Networks under every strategy on ranks that share a GPU: loss and gradients are those of one device."""

from pathlib import Path
from typing import Any

import pytest
import torch

import convmesh as cm
from convmesh import Mesh, models
from convmesh.testing import RankPool, opened

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

NETWORKS = ["resnet18", "unet3d", "cosmoflow", "mobilenet-v2", "convnext-tiny"]
SPLITS = {
    2: [
        (Mesh(data=2), "data"),
        (Mesh(height=2), "spatial"),
        (Mesh(filter=2), "filter"),
        (Mesh(channel=2), "channel"),
        (Mesh(data=2), "hybrid"),
        (Mesh(pipe=2), "pipeline"),
        (Mesh(data=2), "auto"),
    ],
    4: [
        (Mesh(data=4), "data"),
        (Mesh(data=2, height=2), "data+spatial"),
        (Mesh(height=2, width=2), "spatial"),
        (Mesh(data=2, filter=2), "data+filter"),
        (Mesh(data=2, channel=2), "data+channel"),
        (Mesh(data=2, pipe=2), "data+pipeline"),
    ],
}


def worst_error(network: str, mesh: Mesh, strategy: str) -> float:
    """The largest relative error of the loss and of a parameter's gradient."""
    small = models.find(network).small()
    generator = torch.Generator().manual_seed(2)
    x, target = small.draw_input(generator).cuda(), small.draw_target(generator).cuda()
    torch.manual_seed(1)
    model = small.create().double().cuda()
    expected = small.task.loss()(model(x), target)
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.manual_seed(1)
    again = small.create().double().cuda()
    options: dict[str, Any] = {"microbatches": 1} if "pipe" in mesh.axes else {}  # batch norm sees whole batches
    plan = cm.plan(again, tuple(x.shape), mesh, strategy, **options)
    net = cm.parallelize(again, plan, loss=small.task.loss(), mesh=opened(mesh, "cuda"))
    loss = net(net.shard_input(x), net.shard_target(target))
    loss.backward()
    found = net.full_gradients()
    scale = max(float(grad.norm()) for grad in wanted.values())
    errors = [float((found[name] - grad).norm()) / scale for name, grad in wanted.items()]
    return max(*errors, abs(float(loss.item() / expected.item()) - 1))


@pytest.mark.parametrize("ranks", SPLITS)
def test_gradients_are_those_of_one_device(ranks: int, backend: str) -> None:
    """One pool for all: starting CUDA takes longer than they do."""
    failed = []
    with RankPool(ranks, seconds_timeout=240, backend=backend) as pool:
        for mesh, strategy in SPLITS[ranks]:
            for network in NETWORKS:
                error = max(pool.run(worst_error, network, mesh, strategy))
                failed += [(network, mesh, strategy, error)] if not error < 1e-10 else []
    assert not failed
