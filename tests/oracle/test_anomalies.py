"""Profiles from a prediction's own timeline, then disturbed: the disturbance is found."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from convmesh.layout import Mesh
from convmesh.oracle import predict_programs
from convmesh.oracle.anomalies import Anomaly, find_anomalies
from convmesh.oracle.prediction import Prediction
from convmesh.oracle.profile import Profile, TimedTransfer
from convmesh.plans import Step, Wait
from tests.oracle.little_programs import SYSTEM, all_reduce, node, program, work

MESH = Mesh(data=4, filter=8)
LAYERS = ("conv1", "conv2", "conv3", "head")


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    steps: list[Step] = [work(1), all_reduce(4, "filter"), Wait((0,))]
    nodes = [node(name, steps, [work(2 + i)], [name]) for i, name in enumerate(LAYERS)]
    return predict_programs({0: program(MESH, 0, nodes, [(64, LAYERS[::-1])])}, SYSTEM)


@pytest.fixture
def profile(prediction: Prediction) -> Profile:
    """All ranks as predicted, plus a little noise that is the same in every run."""
    made = Profile.of(prediction.timeline)
    noise = {rank: 1 + 0.01 * ((rank * 7) % 5 - 2) for rank in range(MESH.size)}
    layers = {rank: {cell: s * noise[rank] for cell, s in made.layers[0].items()} for rank in range(MESH.size)}
    transfers = tuple(
        replace(t, rank=rank, seconds=t.seconds * noise[rank]) for rank in range(MESH.size) for t in made.transfers
    )
    return Profile(layers, transfers, prediction.seconds_step, ranks_per_node=8)


def slower(profile: Profile, factor: float, chosen: Callable[[int, str, str], bool]) -> Profile:
    layers = {
        rank: {(layer, phase): s * (factor if chosen(rank, layer, phase) else 1) for (layer, phase), s in cells.items()}
        for rank, cells in profile.layers.items()
    }
    return replace(profile, layers=layers)


def slower_links(profile: Profile, factor: float, chosen: Callable[[TimedTransfer], bool]) -> Profile:
    transfers = (replace(t, seconds=t.seconds * factor) if chosen(t) else t for t in profile.transfers)
    return replace(profile, transfers=tuple(transfers))


def only(found: list[Anomaly]) -> Anomaly:
    assert len(found) == 1, [str(one) for one in found]
    return found[0]


def test_what_was_not_seen_to_take_time_is_not_judged(profile: Profile, prediction: Prediction) -> None:
    assert find_anomalies(slower_links(profile, 0.0, lambda _: True), prediction) == []
    assert find_anomalies(slower(profile, 0.0, lambda *_: True), prediction) == []


def test_a_profile_as_predicted_has_no_anomalies(profile: Profile, prediction: Prediction) -> None:
    assert find_anomalies(profile, prediction) == []


def test_a_slow_device(profile: Profile, prediction: Prediction) -> None:
    anomaly = only(find_anomalies(slower(profile, 1.4, lambda rank, *_: rank == 5), prediction))
    assert (anomaly.what, anomaly.rank) == ("rank", 5)
    assert anomaly.ratio == pytest.approx(1.4, rel=0.05)
    assert "rank 5: every layer 1.4x slower" in anomaly.sentence


def test_a_slow_layer_on_every_rank(profile: Profile, prediction: Prediction) -> None:
    off = slower(profile, 2.1, lambda _, layer, phase: (layer, phase) == ("conv3", "backward"))
    anomaly = only(find_anomalies(off, prediction))
    assert (anomaly.what, anomaly.layer, anomaly.phase, anomaly.rank) == ("layer", "conv3", "backward", None)
    assert anomaly.ratio == pytest.approx(2.1, rel=0.05)


def test_a_layer_that_is_off_by_less_than_the_prediction_may_be(profile: Profile, prediction: Prediction) -> None:
    compute = prediction.parts.compute
    within = 1 + 0.8 * (compute.high / compute.value - 1)
    assert find_anomalies(slower(profile, within, lambda _, layer, __: layer == "conv3"), prediction) == []


def test_a_slow_layer_on_one_rank(profile: Profile, prediction: Prediction) -> None:
    off = slower(profile, 3.0, lambda rank, layer, phase: (rank, layer, phase) == (9, "conv1", "forward"))
    anomaly = only(find_anomalies(off, prediction))
    assert (anomaly.rank, anomaly.layer, anomaly.phase) == (9, "conv1", "forward")


def test_slow_links_between_nodes(profile: Profile, prediction: Prediction) -> None:
    """The ranks with filter coordinate 3 sum their gradients over a slow rail; the others do not."""
    group = MESH.group(("data",), 3)
    off = slower_links(profile, 3.0, lambda t: t.phase == "reduction" and t.rank in group)
    listed = find_anomalies(off, prediction)
    found = listed[0]
    assert (found.what, found.axes) == ("link", ("data", "filter"))
    assert found.ratio == pytest.approx(3.0, rel=0.05)
    assert found.sentence.endswith("links between nodes 0, 1, 2 and 3.")


def test_slow_links_of_one_group(profile: Profile, prediction: Prediction) -> None:
    off = slower_links(profile, 2.5, lambda t: t.axes == ("filter",) and t.rank // 8 == 2)
    anomaly = only(find_anomalies(off, prediction))
    assert "links inside node 2" in anomaly.sentence


def test_a_machine_that_is_slower_than_described(profile: Profile, prediction: Prediction) -> None:
    anomaly = only(find_anomalies(slower(profile, 2.5, lambda *_: True), prediction))
    assert anomaly.what == "step"
    assert anomaly.ratio == pytest.approx(2.5, rel=0.05)


def test_the_costliest_comes_first(profile: Profile, prediction: Prediction) -> None:
    off = slower(profile, 1.3, lambda rank, *_: rank == 3)
    off = slower(off, 3.0, lambda _, layer, phase: (layer, phase) == ("head", "backward"))
    anomalies = find_anomalies(off, prediction)
    assert [one.what for one in anomalies] == ["layer", "rank"]
    assert anomalies[0].seconds > anomalies[1].seconds
