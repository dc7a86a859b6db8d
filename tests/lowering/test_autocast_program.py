"""Programs of steps under autocast match what runs under torch's own: traffic, operators, types."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import PlanError
from convmesh.ops.core.sharded import Sharded
from convmesh.plans.plan_file import loads
from tests.conftest import Pools
from tests.lowering.test_lowered_program import step_of

CASES = [
    ("unet3d", "spatial", {"depth": 2}),
    ("resnet18", "filter", {"filter": 2}),
    pytest.param("densenet121", "channel", {"channel": 2}, marks=pytest.mark.full),
    pytest.param("convnext-tiny", "spatial", {"width": 2}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "strategy", "axes"), CASES)
def test_what_runs_under_autocast_is_what_the_program_says(
    pools: Pools, name: str, strategy: str, axes: dict[str, int]
) -> None:
    """Operator by operator, casts included, with the type of every operand."""
    mesh = Mesh(**axes)
    for rank, step in enumerate(pools[mesh.size].run(step_of, name, mesh, strategy, "amp-bf16")):
        assert +step.bytes_sent == +step.bytes_told, f"bytes of rank {rank}"
        assert +step.messages == +step.messages_told, f"messages of rank {rank}"
        assert (step.calls - step.calls_told, step.calls_told - step.calls) == (Counter(), Counter()), (
            f"rank {rank}: only computed, only in the program"
        )


def test_weights_stay_and_what_layers_send_is_half() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    plan = cm.plan(model, (2, 4, 16, 16), Mesh(data=2, height=2), "data+spatial")
    plain, cast = (
        cm.lower_plan(cm.plan(model, (2, 4, 16, 16), strategy=plan, precision=precision)).program
        for precision in ("", "amp-bf16")
    )
    assert cast.bytes_sent["neighbour"] * 2 == plain.bytes_sent["neighbour"]
    assert cast.bytes_sent["all_reduce"] == plain.bytes_sent["all_reduce"], "gradients of weights are float32"
    assert cast.weights == plain.weights


def test_autocast_is_of_the_device_that_is_planned_for() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Softmax(1))
    plan = cm.plan(model, (2, 4, 8, 8), Mesh(height=2), "spatial", precision="amp-bf16")
    types = [[node.dtypes for node in cm.lower_plan(plan, device=kind).program.nodes] for kind in ("cpu", "cuda")]
    assert types == [
        [("float32",), ("bfloat16",), ("bfloat16",)],
        [("float32",), ("bfloat16",), ("float32",)],
    ]


def test_plans_of_one_network_in_two_precisions_share_no_calls() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
    plan = cm.plan(model, (2, 4, 8, 8), Mesh(height=2), "spatial")
    seconds = [cm.predict(plan, "dgx-a100", precision=name).bytes_sent for name in ("", "amp-fp16", "", "amp-bf16")]
    assert seconds[0] == seconds[2] > seconds[1] == seconds[3]


def test_precision_is_kept_in_plan_files() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1))
    plan = cm.plan(model, (2, 4, 8, 8), Mesh(height=2), "spatial", precision="amp-fp16")
    assert 'precision = "amp-fp16"' in str(plan)
    assert loads(str(plan)).precision == "amp-fp16"
    assert "precision" not in str(cm.plan(model, (2, 4, 8, 8), strategy=plan, precision=""))


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(PlanError, match="`precision` \\(='bf16'\\) must be one of '', 'amp-bf16', 'amp-fp16'"):
        cm.plan(nn.Linear(2, 2), (2, 2), Mesh(), "data", precision="bf16")  # type: ignore[arg-type]


def squares(y: Sharded, target: Any) -> torch.Tensor:
    """A loss that sends nothing."""
    del target
    return y.local.square().mean()


def staged() -> tuple[int, int, torch.dtype]:
    """The bytes that cross between stages under autocast, in the program and in a step; and the outputs' type."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    plan = cm.plan(model, (4, 2, 8, 8), Mesh(pipe=2), "pipeline", precision="amp-bf16")
    net = cm.parallelize(model, plan, loss=squares)
    shards = net.shard_input(torch.randn(4, 2, 8, 8)), net.shard_target(torch.zeros(4))
    for _ in range(2):
        with net.mesh.traffic.watch() as seen, torch.autocast("cpu", torch.bfloat16):
            loss = net(*shards)
        loss.backward()
    return net.program.bytes_sent["stage"], seen.bytes_sent["stage"], loss.dtype


def test_values_cross_between_stages_in_the_type_of_autocast(pools: Pools) -> None:
    for told, sent, dtype in pools[2].run(staged):
        assert told == sent > 0
        assert dtype == torch.float32
