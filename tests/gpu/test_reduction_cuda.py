"""Every reduction with weights on a GPU: over Gloo buckets go through the host."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from convmesh import Mesh
from convmesh.gradients.clip import clip_grad_norm_
from convmesh.gradients.hierarchical import HierarchicalReducer
from convmesh.gradients.local_gradients import local_of
from convmesh.gradients.reduction import GradientReducer
from convmesh.gradients.root_update import BroadcastReducer
from convmesh.gradients.scaler import GradScaler
from convmesh.gradients.scattered import ShardedReducer
from convmesh.gradients.sharded_optimizer import ShardedOptimizer
from convmesh.testing import opened
from tests.gpu.conftest import GpuPools, Ranks
from tests.gradients.partial_nets import Towers, assert_same, batches

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

REDUCTIONS: dict[str, Any] = {
    "bucketed": GradientReducer,
    "hierarchical": partial(HierarchicalReducer, ranks_per_host=2),
    "sharded": ShardedReducer,
    "broadcast": BroadcastReducer,
}


def trained(mesh: Mesh | None, reduction: str = "") -> dict[str, Any]:
    """Weights after steps with accumulation, scaling and clipping."""
    held = None if mesh is None else opened(mesh, "cuda")
    net = Towers(held).cuda()
    scaler = torch.amp.GradScaler("cuda") if held is None else GradScaler()
    options = {"net": net} if reduction == "broadcast" else {}
    reducer = (
        None
        if held is None
        else REDUCTIONS[reduction](held, net.axes_of(), bytes_bucket=200, bytes_first=50, **options)
    )
    optimizer: Any = (
        ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
        if isinstance(reducer, ShardedReducer)
        else torch.optim.AdamW(net.parameters(), lr=0.01)
    )
    for x in batches():
        for _ in range(2):
            scaler.scale(net(x.cuda())).backward()
        scaler.unscale_(optimizer)
        if held is None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        elif isinstance(optimizer, ShardedOptimizer):
            optimizer.clip_grad_norm_(0.5)
        else:
            clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {name: local_of(value).cpu() for name, value in sorted(net.state_dict().items())}


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(data=4), Mesh(data=2, height=2), Mesh(data=2, channel=2)], ids=str)
def test_weights_are_those_of_one_device(mesh: Mesh, ranks: Ranks, pools: GpuPools) -> None:
    (expected,) = pools.of(1, "gloo").run(trained, None)
    for reduction in REDUCTIONS:
        for rank, found in enumerate(ranks(mesh.size).run(trained, mesh, reduction)):
            shard = expected["cut"].chunk(mesh.extent(["channel"]))[mesh.coordinates(rank).get("channel", 0)]
            assert_same(found, {**expected, "cut": shard})
