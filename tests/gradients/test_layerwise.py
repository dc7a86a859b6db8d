"""LARS and LAMB: the papers' formulas, and the same updates when weights are cut."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convmesh import LAMB, LARS, Mesh, parallelize, plan
from convmesh.testing import RankPool

Pools = dict[int, RankPool]
KINDS: dict[str, Any] = {"lars": (LARS, {"lr": 2.0, "trust": 0.01}), "lamb": (LAMB, {"lr": 0.05})}
CASES = [(Mesh(filter=2), "filter"), (Mesh(data=2, channel=2), "data+channel"), (Mesh(height=2), "spatial")]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    ).double()


def trained(name: str, mesh: Mesh | None = None, strategy: str = "data") -> dict[str, Any]:
    kind, options = KINDS[name]
    torch.manual_seed(1)
    x, target = torch.randn(4, 2, 6, 6).double(), torch.randint(0, 3, (4,))
    model: Any = network()
    if mesh is not None:
        model = parallelize(model, plan(model, x, mesh, strategy), loss=F.cross_entropy)
    wide = [p for p in model.parameters() if p.dim() > 1]
    thin = {"params": [p for p in model.parameters() if p.dim() == 1], "adapt": False, "weight_decay": 0.0}
    optimizer = kind([{"params": wide}, thin], weight_decay=0.1, **options)
    for _ in range(3):
        if mesh is None:
            loss = F.cross_entropy(model(x), target)
        else:
            loss = model(model.shard_input(x), model.shard_target(target))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict() if mesh is None else model.full_state_dict())


@pytest.mark.parametrize("name", KINDS)
def test_cut_weights_are_updated_as_whole_ones(name: str, pools: Pools) -> None:
    expected = trained(name)
    for mesh, strategy in CASES:
        for state in pools[mesh.size].run(trained, name, mesh, strategy):
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-12)


def test_lars_scales_a_layer_by_its_norms() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    weight.grad = torch.tensor([[0.0, 2.0]])
    LARS([weight], lr=1.0, momentum=0.0, trust=0.1).step()
    torch.testing.assert_close(weight.data, torch.tensor([[3.0, 4.0 - 0.1 * 5 / 2 * 2]]))


def test_lamb_moves_a_layer_by_a_fraction_of_its_norm() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    weight.grad = torch.tensor([[1.0, -7.0]])
    LAMB([weight], lr=0.1, eps=1e-12).step()
    step = 0.1 * 5 / 2**0.5  # the first update of Adam is the sign of the gradient
    torch.testing.assert_close(weight.data, torch.tensor([[3.0 - step, 4.0 + step]]))
