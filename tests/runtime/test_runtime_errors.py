"""Users' mistakes: one clear error, the same on every rank, before training starts if possible."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convmesh as cm
from convmesh import ConvMeshError, Mesh, MeshError, PlanError, UnsupportedError
from convmesh.plans import strategy_for
from tests.conftest import Pools

SHAPE = (4, 3, 8, 8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))


def net(mesh: Mesh = Mesh(height=2)) -> Any:  # noqa: B008 - a value
    made = model()
    return cm.parallelize(made, cm.plan(made, SHAPE, mesh, strategy_for(mesh)), loss=F.mse_loss)


def error_of(case: str) -> str:
    """The message of a user's mistake on every rank, or on one only."""
    rank = torch.distributed.get_rank()
    x = torch.ones(SHAPE)
    try:
        if case == "wrong mesh":
            cm.parallelize(model(), cm.plan(model(), SHAPE, Mesh(data=3), "data"))
        elif case == "another model":
            plan = cm.plan(
                nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), SHAPE, Mesh(height=2), "spatial"
            )
            cm.parallelize(model(), plan)
        elif case == "twice":
            made = model()
            cm.parallelize(made, cm.plan(made, SHAPE, Mesh(filter=2), "filter"))
            cm.parallelize(made, cm.plan(made, SHAPE, Mesh(filter=2), "filter"))
        elif case == "global input":
            net()(x, torch.ones(4, 2, 8, 8))
        elif case == "one rank's input":
            split = net()
            shard = split.shard_input(x)
            split(shard if rank else shard[:, :, :1].clone(), split.shard_target(torch.ones(4, 2, 8, 8)))
        elif case == "sample":
            net().shard_input(torch.ones(4, 3, 9, 8))
        elif case == "arguments":
            net()(x, x, x)
        elif case == "loss":
            made = model()
            split = cm.parallelize(
                made, cm.plan(made, SHAPE, Mesh(height=2), "spatial"), loss=lambda y, t: (y - t) ** 2
            )
            split(split.shard_input(x), split.shard_target(torch.ones(4, 2, 8, 8)))
        elif case == "nan":
            split = net()
            target = split.shard_target(torch.ones(4, 2, 8, 8))
            split(split.shard_input(x), target)
            x[0, 0, 7, 0] = torch.nan
            split(split.shard_input(x), target)
        elif case == "different plans":
            made = model()
            cm.parallelize(made, cm.plan(made, SHAPE, Mesh(filter=2), {"*": {"channel": "filter"} if rank else {}}))
    except ConvMeshError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("wrong mesh", "MeshError: `mesh` (=Mesh(data=3)) has 3 ranks, but there are 2 ranks of this job"),
        ("another model", "PlanError: the plan was made for another network"),
        ("twice", "PlanError: `model` has been cut already"),
        (
            "global input",
            "input 0 must be rank 0's shard of shape (4, 3, 4, 8) of a global tensor of shape (4, 3, 8, 8)",
        ),
        ("one rank's input", "input 0 must be rank 0's shard of shape (4, 3, 4, 8)"),
        ("sample", "ShapeError: the input has shape (4, 3, 9, 8), but the plan was made for (4, 3, 8, 8)"),
        ("arguments", "`net` was called with 3 arguments; it takes 1 input(s) and a target"),
        ("loss", "UnsupportedError: `loss` gave a tensor of shape (4, 2, 8, 8); it must give one number"),
        ("nan", "NonFiniteLossError: the loss of step 1 is not a number; the outputs of rank 1 are not finite"),
        ("different plans", "DisagreementError: `parallelize`"),
    ],
)
def test_every_rank_says_the_same(pools: Pools, case: str, says: str) -> None:
    first, second = pools[2].run(error_of, case)
    assert says in first
    assert first == second or (case == "different plans" and says in second)


def test_without_a_process_group() -> None:
    made = model()
    with pytest.raises(MeshError, match=r"call `convmesh.init\(\)` first"):
        cm.parallelize(made, cm.plan(made, SHAPE, Mesh(height=2), "spatial"))


def test_plans_name_the_layer_that_cannot_be_cut() -> None:
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    with pytest.raises(
        UnsupportedError, match=r"layer '1' .*4 ranks > 2 filters; the largest split that works is 2 ways"
    ):
        cm.plan(made, SHAPE, Mesh(filter=4), {"*": {"channel": "filter"}})
    with pytest.raises(PlanError, match="cut by axis 'height', but the plan's mesh"):
        cm.plan(made, SHAPE, Mesh(filter=4), {"*": {"height": "height"}})
    with pytest.raises(PlanError, match="the plan has layer 'conv1', but the network has none"):
        cm.plan(made, SHAPE, Mesh(height=2), {"*": {}, "conv1": {"height": "height"}})


def test_an_operator_without_a_split_version_is_named_with_its_layer() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.linalg.qr(x).Q
            return result

    with pytest.raises(UnsupportedError, match=r"layer '1.*qr.*has no split version"):
        cm.plan(nn.Sequential(nn.Conv2d(3, 3, 1), Odd()), SHAPE, Mesh(height=2), "spatial")


class Chooses(nn.Module):
    """Looks at values, so it needs whole samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.detach().abs().sum()) > 1e9 else x.clamp(min=0)


def with_opaque(mesh: Mesh | None) -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Chooses(), nn.Conv2d(4, 2, 3, padding=1)).double()
    x = torch.randn(SHAPE, dtype=torch.float64)
    if mesh is None:
        y = made(x)
        y.square().mean().backward()
        return y.detach(), {n: p.grad for n, p in made.named_parameters()}
    with pytest.warns(UserWarning, match="1"):
        plan = cm.plan(made, SHAPE, mesh, strategy_for(mesh))
    split = cm.parallelize(made, plan, loss=lambda y, t: (y * t).square().mean())
    y = split.gather_output(split(split.shard_input(x))).detach()
    split(split.shard_input(x), split.shard_target(torch.ones(4, 2, 8, 8, dtype=torch.float64))).backward()
    return y, split.full_gradients()


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(height=2), Mesh(filter=2)], ids=str)
def test_opaque_layers_run_on_whole_samples(pools: Pools, mesh: Mesh) -> None:
    (whole,) = pools[1].run(with_opaque, None)
    for found in pools[2].run(with_opaque, mesh):
        torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)
