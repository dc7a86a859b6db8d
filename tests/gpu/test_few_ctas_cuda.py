"""Halos, sums of gradients and messages between stages under way at once, each group with one CTA: none waits for ever.

A deadlock ends as a rank that did not return in time, with the stacks of all.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.testing import RankPool, opened

from .conftest import nccl_takes_several

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
    pytest.mark.skipif(not nccl_takes_several(), reason="NCCL needs a GPU for each rank, or 2.30 and leave to share"),
]

STEPS = 40
CASES = [
    (Mesh(height=2), "spatial"),
    (Mesh(data=2, height=2), "data+spatial"),
    (Mesh(pipe=2, data=2), "data+pipeline"),
]


def network(layers: int = 8, channels: int = 128) -> nn.Module:
    """Gradients of more than a megabyte a layer: sums of the last layers are under way when halos of the first are."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers)]
    body = [part for conv in convs for part in (conv, nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *body, nn.Conv2d(channels, 3, 1)).double()


def losses(mesh: Mesh, strategy: str, compiling: bool, device: str = "cuda", steps: int = STEPS) -> list[float]:
    """Of many steps of which none waits for the one before."""
    model = network()
    x = torch.randn(8, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"microbatches": 2} if "pipe" in mesh.axes else {}
    plan = cm.plan(model, tuple(x.shape), mesh, strategy, **options)
    net = cm.parallelize(model, plan, F.mse_loss, mesh=opened(mesh, device), check_loss=False, compile=compiling)
    reducer = net._running.reducer
    assert reducer is not None
    assert len(reducer.buckets) >= 2
    args = net.shard_input(x), net.shard_target(x.flip(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(*args)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    assert getattr(net._running.engine, "told", []) == []
    return torch.stack(found).tolist()


@pytest.mark.parametrize(("mesh", "strategy"), CASES, ids=str)
def test_one_cta_a_group_is_enough(mesh: Mesh, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"):
        monkeypatch.setenv(name, "1")  # ranks are forked with it
    with RankPool(mesh.size, seconds_timeout=280, backend="nccl") as pool:
        eager, compiled = (pool.run(losses, mesh, strategy, compiling) for compiling in (False, True))
    for expected, found in zip(eager, compiled, strict=True):
        assert expected[-1] < expected[0]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-8, atol=1e-8)
