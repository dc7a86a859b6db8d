"""The root scheme trains like one device, and layers wait only for their own weights."""

from typing import Any

import pytest
import torch
from torch import nn

from convmesh import LayoutError, Mesh, UnsupportedError
from convmesh.dist import Traffic
from convmesh.gradients.clip import clip_grad_norm_
from convmesh.gradients.root_update import BroadcastReducer
from convmesh.testing import RankPool, opened
from tests.gradients.partial_nets import MESHES, Towers, assert_same, batches, whole

Pools = dict[int, RankPool]


def trained(mesh: Mesh | None, chunks: int = 3) -> tuple[int, dict[str, Any]]:
    """How many parameters have optimiser state on this rank, and the weights after steps with accumulation."""
    net = Towers(None if mesh is None else opened(mesh))
    if mesh is not None:
        net.reducer = BroadcastReducer(opened(mesh), net.axes_of(), net, chunks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for first, second in zip(batches(), reversed(batches()), strict=True):
        for x in (first, second):
            net(x).backward()
        if mesh is None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        else:
            clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return len(optimizer.state), {name: whole(value) for name, value in sorted(net.state_dict().items())}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("chunks", [1, 4, 100])
def test_weights_are_those_of_one_device(mesh: Mesh, chunks: int, pools: Pools) -> None:
    states, expected = pools[1].run(trained, None)[0]
    found = pools[mesh.size].run(trained, mesh, chunks)
    for _, weights in found:
        assert_same(weights, expected)
    assert found[0][0] == states
    assert found[-1][0] == 0


def after_a_step(mesh: Mesh) -> tuple[nn.Sequential, BroadcastReducer, Traffic]:
    """A network of two layers, one chunk each, whose weights are under way; and the traffic so far."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    reducer = BroadcastReducer(opened(mesh), [(p, ("data",)) for p in net.parameters()], net, chunks=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with opened(mesh).traffic.watch() as sent:
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return net, reducer, sent


def chunks_seen_by_layers() -> list[list[bool]]:
    """Which chunks are under way when each layer runs."""
    net, reducer, _ = after_a_step(Mesh(data=2))
    seen: list[list[bool]] = []
    for layer in net:
        layer.register_forward_hook(lambda *_: seen.append([chunk.is_under_way for chunk in reducer.chunks]))
    net(torch.ones(2, 4))
    return seen


def test_a_layer_waits_for_its_own_chunk_only(pools: Pools) -> None:
    assert pools[2].run(chunks_seen_by_layers) == [[[False, True], [False, False]]] * 2


def traffic_of_a_step() -> Traffic:
    return after_a_step(Mesh(data=4))[2]


def test_the_root_receives_gradients_and_sends_weights(pools: Pools) -> None:
    first, *middle, last = pools[4].run(traffic_of_a_step)
    bytes_weights, bytes_counts = 2 * 16 * 4, 2 * 4
    assert first.bytes_sent == {"broadcast": bytes_weights}
    assert last.bytes_sent == {"reduce": bytes_weights + bytes_counts}
    assert all(rank.bytes_sent == first.bytes_sent + last.bytes_sent for rank in middle)
    assert first.calls["broadcast"] == 2


def use_without_forward() -> float:
    net, reducer, _ = after_a_step(Mesh(data=2))
    weight = list(net.parameters())[1]
    stale = weight.sum()
    with pytest.raises(UnsupportedError, match="outside the forward"):
        stale.backward()
    reducer.reset()
    reducer.wait()
    fresh = weight.sum()
    fresh.backward()
    return float(fresh.item())


def test_reading_weights_too_early_is_detected(pools: Pools) -> None:
    first, second = pools[2].run(use_without_forward)
    assert first == second


def refuses_chunks() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(LayoutError, match=r"chunks.*=0"):
        BroadcastReducer(opened(Mesh()), [(p, ("data",)) for p in net.parameters()], net, chunks=0)


def test_chunks_are_counted_from_one(pools: Pools) -> None:
    pools[1].run(refuses_chunks)
