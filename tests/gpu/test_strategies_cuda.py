"""Networks under every strategy on ranks that share a GPU: loss and gradients are those of one device."""

from pathlib import Path
from typing import Any

import pytest
import torch

import convmesh as cm
from convmesh import Mesh, models
from convmesh.plans.presets import STRATEGIES
from convmesh.testing import opened
from tests.gpu.conftest import Ranks

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

NETWORKS = ["resnet18", "unet3d", "cosmoflow", "mobilenet-v2", "convnext-tiny", "vit"]
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
        (Mesh(filter=4), "filter"),
        (Mesh(channel=4), "channel"),
        (Mesh(pipe=4), "pipeline"),
        (Mesh(data=4), "hybrid"),
        (Mesh(data=4), "auto"),
    ],
}


def worst_error(network: str, mesh: Mesh, strategy: str, more: dict[str, Any] | None = None) -> float:
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
    options: dict[str, Any] = (
        {"microbatches": 1} if "pipe" in mesh.axes else more or {}
    )  # batch norm sees whole batches
    plan = cm.plan(again, tuple(x.shape), mesh, strategy, **options)
    net = cm.parallelize(again, plan, loss=small.task.loss(), mesh=opened(mesh, "cuda"))
    loss = net(net.shard_input(x), net.shard_target(target))
    loss.backward()
    found = net.full_gradients()
    scale = max(float(grad.norm()) for grad in wanted.values())
    errors = [float((found[name] - grad).norm()) / scale for name, grad in wanted.items()]
    return max(*errors, abs(float(loss.item() / expected.item()) - 1))


@pytest.mark.parametrize("count", SPLITS)
@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_are_those_of_one_device(network: str, count: int, ranks: Ranks) -> None:
    errors = {
        (str(mesh), strategy): max(ranks(count).run(worst_error, network, mesh, strategy))
        for mesh, strategy in SPLITS[count]
    }
    assert {case: error for case, error in errors.items() if not error < 1e-10} == {}


def test_every_strategy_is_tried_on_two_and_on_four_ranks() -> None:
    simple = {strategy for strategy in STRATEGIES if "+" not in strategy}
    assert simple | {"auto"} == {strategy for _, strategy in SPLITS[2]}
    assert {*STRATEGIES, "auto"} == {strategy for _, strategy in SPLITS[4]}


@pytest.mark.parametrize("count", SPLITS)
def test_keys_and_values_go_round(count: int, ranks: Ranks) -> None:
    errors = ranks(count).run(worst_error, "vit", Mesh(height=count), "spatial", {"attention": "ring"})
    assert max(errors) < 1e-10
