"""Where strategies stop scaling, and what stops them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from convmesh.graph import Captured, capture
from convmesh.oracle import Assumptions
from convmesh.oracle.scaling_limits import Curve, limit_of, with_bandwidth, without_latency
from convmesh.oracle.search import Refusal, RefusalKind
from convmesh.planner.scaling import Scaling, scale
from convmesh.system import System

SLOW = Assumptions(tf32=False)
"""On tensor cores so small a network would be bound by its transfers from two ranks on."""


def network(batch: int) -> Captured:
    with torch.device("meta"):
        layers = [nn.Conv2d(32, 32, 3, padding=1) for _ in range(4)]
        return capture(nn.Sequential(*layers), (batch, 32, 256, 256))


@pytest.fixture(scope="module")
def strong() -> Scaling:
    net = network(8)
    return scale(
        lambda _: net, System.load("dgx-a100"), [1, 2, 4, 8, 16, 32], ("data", "filter", "spatial", "pipeline"), SLOW
    )


def curve(scaling: Scaling, strategy: str) -> Curve:
    return next(curve for curve in scaling.curves if curve.strategy == strategy)


def test_data_parallelism_ends_with_the_batch(strong: Scaling) -> None:
    limit = curve(strong, "data").limit
    assert limit is not None
    assert (limit.ranks, limit.term, limit.reason) == (8, "batch", "data: 16 ranks > 8 samples")


def test_pipelines_end_with_the_layers(strong: Scaling) -> None:
    limit = curve(strong, "pipeline").limit
    assert limit is not None
    assert (limit.ranks, limit.term, limit.reason) == (4, "stages", "pipe: 8 ranks > 4 stages")


def test_the_binding_term_is_the_one_whose_removal_helps_most(strong: Scaling) -> None:
    limit = curve(strong, "filter").limit
    assert limit is not None
    assert limit.ranks < 32
    assert limit.term in ("latency", "bandwidth", "computation")


def test_speeds_rise_up_to_the_limit_and_nothing_is_evaluated_beyond(strong: Scaling) -> None:
    for found in strong.curves:
        assert found.limit is not None or found.points[-1].ranked is not None
        speeds = [p.samples_per_second for p in found.points if found.limit is None or p.ranks <= found.limit.ranks]
        assert speeds == sorted(speeds)
    assert 0.5 < strong.efficiency(curve(strong, "data").points[0]) <= 1.0


def test_weak_scaling_keeps_samples_for_each_rank() -> None:
    found = scale(lambda ranks: network(2 * ranks), System.load("dgx-a100"), [1, 4, 16], ("data",))
    assert [point.batch for point in curve(found, "data").points] == [2, 8, 32]
    assert curve(found, "data").limit is None


def test_rank_counts_without_a_mesh_are_not_a_limit() -> None:
    net = network(8)
    found = scale(lambda _: net, System.load("dgx-a100"), [1, 2, 4, 8], ("data+filter",), SLOW)
    points = curve(found, "data+filter").points
    assert [point.ranked is not None for point in points] == [True, False, True, True]
    assert points[1].is_gap


def test_unevaluated_points_are_not_a_limit(strong: Scaling) -> None:
    data = curve(strong, "data")
    refused = replace(data.points[4], refusal=Refusal(kind=RefusalKind.NOT_EVALUATED, detail="; it takes long"))
    assert limit_of([*data.points[:4], refused], lambda _: "latency") is None


def test_a_curve_without_plans_has_no_limit() -> None:
    assert limit_of([], lambda _: "latency") is None


def test_changed_systems_differ_in_one_thing() -> None:
    system = System.load("dgx-a100")
    quick, wide = without_latency(system), with_bandwidth(system)
    assert float(quick.links[0].seconds_latency) < 1e-9 < float(system.links[0].seconds_latency)
    assert quick.links[0].bytes_per_second == system.links[0].bytes_per_second
    assert float(wide.links[0].bytes_per_second) == pytest.approx(1e6 * float(system.links[0].bytes_per_second))
    assert wide.links[0].seconds_latency == system.links[0].seconds_latency
