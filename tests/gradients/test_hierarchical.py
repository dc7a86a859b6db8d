"""Sums in two levels: the gradients of one device, and what of them leaves a host."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from convmesh import Mesh
from convmesh.dist import dry_mesh
from convmesh.dist.traffic import Sent
from convmesh.gradients.hierarchical import HierarchicalBucket, HierarchicalReducer
from convmesh.testing import RankPool, opened
from tests.gradients.partial_nets import Towers, assert_same, batches, gradients
from tests.gradients.test_reduction import SCENARIOS, SMALL

Pools = dict[int, RankPool]
ByAxes = Counter[tuple[str, tuple[str, ...]]]

PLACES = [
    (Mesh(data=4), 2),
    (Mesh(data=2, height=2), 2),
    (Mesh(data=2, channel=2), 2),
    (Mesh(data=6), 2),
    (Mesh(data=6), 3),
    (Mesh(data=3, height=2), 2),
    (Mesh(data=3, height=2), 3),
]
"""Meshes, and ranks on each host."""
CARRIERS = ("reduce_scatter", "all_reduce", "all_gather")


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    nets = [Towers(None) for _ in SCENARIOS]
    for net, scenario in zip(nets, SCENARIOS, strict=True):
        scenario(net, nullcontext)
    return [gradients(net) for net in nets]


def together(mesh: Mesh, ranks_per_host: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The gradients of every scenario."""
    found = []
    for scenario in SCENARIOS:
        net = Towers(opened(mesh))
        reducer = HierarchicalReducer(opened(mesh), net.axes_of(), ranks_per_host, **options)
        scenario(net, reducer.no_sync)
        found.append(gradients(net))
        reducer.close()
    return found


@pytest.mark.parametrize("options", [SMALL, {}, {"bytes_segment": 40}], ids=["many", "one", "segments"])
@pytest.mark.parametrize(("mesh", "ranks_per_host"), PLACES, ids=str)
def test_gradients_are_those_of_one_device(
    mesh: Mesh, ranks_per_host: int, options: dict[str, Any], pools: Pools, expected: list[dict[str, Any]]
) -> None:
    for found in pools[mesh.size].run(together, mesh, ranks_per_host, options):
        for mine, of_one in zip(found, expected, strict=True):
            assert_same(mine, of_one)


def sent_in_a_step(mesh: Mesh, ranks_per_host: int) -> tuple[ByAxes, ByAxes]:
    """Bytes by carrier and axes: of ranks that run, and of a dry run of this rank."""
    counted = []
    for view in (opened(mesh), dry_mesh(mesh, opened(mesh).rank)):
        net, found = Towers(opened(mesh)), ByAxes()
        axes_of = net.axes_of()
        if view.is_dry:
            axes_of = [(torch.nn.Parameter(torch.empty_like(p, device="meta")), axes) for p, axes in axes_of]
        reducer = HierarchicalReducer(view, axes_of, ranks_per_host, watches=not view.is_dry)

        def note(event: object, found: ByAxes = found) -> None:
            if isinstance(event, Sent):
                found[event.carrier, event.axes] += event.bytes_sent

        view.traffic.listener = note
        if view.is_dry:
            reducer.reduce_now()
        else:
            net(batches()[0]).backward()
        view.traffic.listener = None
        reducer.close()
        counted.append(found)
    return counted[0], counted[1]


@pytest.mark.parametrize(
    ("mesh", "ranks_per_host"), [(Mesh(data=4), 2), (Mesh(data=6), 3), (Mesh(data=2, height=2), 2)]
)
def test_a_dry_run_sends_what_ranks_send(mesh: Mesh, ranks_per_host: int, pools: Pools) -> None:
    for sent, dry in pools[mesh.size].run(sent_in_a_step, mesh, ranks_per_host):
        assert sent == dry


def dry_reducer(
    mesh: Mesh, ranks_per_host: int, weights: int = 1, **options: Any
) -> tuple[HierarchicalReducer, list[Sent]]:
    """A reducer of weights of 1,199 values, each in a bucket of its own, and what it posts."""
    view, posted = dry_mesh(mesh), []
    view.traffic.listener = lambda event: posted.append(event) if isinstance(event, Sent) else None
    parameters = [torch.nn.Parameter(torch.zeros(1199, device="meta")) for _ in range(weights)]
    axes_of = [(parameter, ("data",)) for parameter in parameters]
    return HierarchicalReducer(view, axes_of, ranks_per_host, bytes_bucket=1, bytes_first=1, **options), posted


@pytest.mark.parametrize(("ranks", "ranks_per_host"), [(4, 2), (6, 2), (6, 3), (32, 8)])
def test_what_leaves_a_host_is_a_ring_of_hosts(ranks: int, ranks_per_host: int) -> None:
    """1,200 values with their count: 2(h-1)/h of them leave each of h hosts."""
    reducer, posted = dry_reducer(Mesh(data=ranks), ranks_per_host)
    reducer.reduce_now()
    hosts, size = ranks // ranks_per_host, 1200 * 4
    scatter, across, gather = posted
    assert (scatter.carrier, across.carrier, gather.carrier) == CARRIERS
    assert scatter.axes == gather.axes == (f"data%{ranks_per_host}",)
    assert across.axes == (f"data/{ranks_per_host}",)
    assert across.bytes_sent * ranks_per_host == 2 * (hosts - 1) * size // hosts
    assert scatter.bytes_sent == gather.bytes_sent == size * (ranks_per_host - 1) // ranks_per_host


@pytest.mark.parametrize("bytes_segment", [1, 4, 400, 1196, 1200, 2400])
def test_segments_hold_no_more_than_they_may_and_are_sent_like_the_whole(bytes_segment: int) -> None:
    """A rank receives 600 of 1,200 values, and sends as many bytes of them to the other host."""
    reducer, posted = dry_reducer(Mesh(data=4), 2, bytes_segment=bytes_segment)
    reducer.reduce_now()
    legs = [[sent.bytes_sent for sent in posted if sent.carrier == carrier] for carrier in CARRIERS]
    assert [sent.carrier for sent in posted] == [carrier for carrier in CARRIERS for _ in legs[0]]
    assert [sum(leg) for leg in legs] == 3 * [2400]
    assert len(legs[0]) == -(-2400 // max(4, bytes_segment))
    assert max(map(max, legs)) <= max(4, bytes_segment)


@pytest.mark.parametrize(("mesh", "ranks_per_host"), [(Mesh(data=4), 4), (Mesh(data=2, height=2), 2)])
def test_groups_on_one_host_or_of_one_rank_a_host_are_summed_at_once(mesh: Mesh, ranks_per_host: int) -> None:
    reducer, posted = dry_reducer(mesh, ranks_per_host)
    reducer.reduce_now()
    assert [(sent.carrier, sent.axes) for sent in posted] == [("all_reduce", ("data",))]


def test_groups_that_lie_unevenly_on_hosts_are_summed_at_once() -> None:
    reducer, posted = dry_reducer(Mesh(data=3, height=2), 3)
    reducer.reduce_now()
    assert [(sent.carrier, sent.axes) for sent in posted] == [("all_reduce", ("data",))]


def test_the_link_between_hosts_is_used_during_backward() -> None:
    """A bucket crosses when the next one starts, the last one after backward; each once, also if buckets are alike."""
    reducer, posted = dry_reducer(Mesh(data=4), 2, weights=3)
    assert all(isinstance(bucket, HierarchicalBucket) for bucket in reducer.buckets)
    for _ in range(2):
        posted.clear()
        for bucket in reducer.buckets:
            bucket.start()
        during = [sent.carrier for sent in posted]
        for leg in ("relay", "finish"):
            for bucket in reducer.buckets:
                getattr(bucket, leg)()
        assert during == ["reduce_scatter", "reduce_scatter", "all_reduce", "reduce_scatter", "all_reduce"]
        assert [sent.carrier for sent in posted[len(during) :]] == ["all_reduce"] + 3 * ["all_gather"]


def after_reset(mesh: Mesh) -> dict[str, Any]:
    """Gradients of a step behind one that was abandoned when some buckets were on their way."""
    net = Towers(opened(mesh))
    reducer = HierarchicalReducer(opened(mesh), net.axes_of(), 2, **SMALL)
    with torch.no_grad():
        for bucket in reducer.buckets[:2]:
            bucket.start()
        reducer._next = 2
    reducer.reset()
    net(batches()[0]).backward()
    return gradients(net)


def test_a_reset_ends_sums_that_are_on_their_way(pools: Pools, expected: list[dict[str, Any]]) -> None:
    for found in pools[4].run(after_reset, Mesh(data=4)):
        assert_same(found, expected[0])
