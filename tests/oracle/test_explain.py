"""Explanations match the runtime: formulas equal the program to the byte."""

import itertools

import pytest

import convmesh as cm
from convmesh.layout import Box, Layout
from convmesh.oracle.explain import Explanation, parse_layer
from convmesh.oracle.explain.bubbles import slots
from convmesh.oracle.explain.pictures import Tensor, picture
from convmesh.planner.explaining import explain
from convmesh.plans.default_mesh import mesh_for
from convmesh.plans.presets import STRATEGIES

CONV, STRIDED, VOLUME, DENSE = (
    "conv 16x12x3x3 on 8x12x14x13",
    "conv 10x3x7x7 on 8x3x32x32 stride 2",
    "conv 8x8x5x5x5 on 4x8x12x12x12",
    "linear 24x20 on 16x20",
)


def explained(strategy: str, layer: str, ranks: int, algorithm: str = "auto") -> Explanation:
    spec = parse_layer(layer)
    return explain(strategy, spec, mesh_for(strategy, ranks, len(spec.space)), algorithm)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_formulas_equal_the_program(strategy: str, ranks: int) -> None:
    for layer in (CONV, DENSE) if "spatial" not in strategy else (CONV, VOLUME):
        found = explained(strategy, layer, ranks)
        assert found.by_formula == found.sent
        assert found.agrees
        assert (sum(found.sent.values()) > 0) == (ranks > 1)
        assert found.bytes_memory >= found.bytes_weights > 0


@pytest.mark.parametrize(("strategy", "ranks"), [("spatial", 8), ("filter", 8), ("data+pipeline", 6), ("data", 3)])
def test_formulas_hold_for_strides_few_channels_and_uneven_parts(strategy: str, ranks: int) -> None:
    assert explained(strategy, STRIDED, ranks).agrees


@pytest.mark.parametrize(("algorithm", "ranks"), [("x", 5), ("y", 5), ("x", 4), ("y", 4)])
def test_every_algorithm_for_channels(algorithm: str, ranks: int) -> None:
    found = explained("channel", CONV, ranks, algorithm)
    assert found.shared.algorithm == algorithm
    assert found.agrees


def test_a_grid_of_ranks_keeps_the_weight() -> None:
    found = explain("channel", parse_layer(CONV), cm.Mesh(channel=2, filter=2), "w")
    assert found.agrees
    assert {volume.phase for volume in found.volumes} == {"forward", "backward-data", "backward-filter"}
    assert found.alternatives["w"] == sum(found.sent.values()) < min(found.alternatives["x"], found.alternatives["y"])


def test_data_parallel_volume_is_the_textbooks() -> None:
    """2·(p−1)/p·|w|, plus one count that travels with the weight."""
    found = explained("data", "conv 256x256x3x3 on 8x256x56x56", 4)
    assert found.sent == {"forward": 0, "backward": 0, "reduction": 2 * 3 * (256 * 256 * 9 + 1) * 4 // 4}


def test_a_halo_is_a_row_each_way() -> None:
    found = explain("spatial", parse_layer("conv 4x4x3x3 on 2x4x12x10"), cm.Mesh(height=3))
    rows = 2 * (2 * 4 * 10 * 4)  # two neighbours: samples, channels, width, bytes
    assert (found.sent["forward"], found.sent["backward"]) == (rows, rows)


@pytest.mark.parametrize(
    ("strategy", "layer", "most", "why"),
    [
        ("data", CONV, 8, "8 samples"),
        ("filter", CONV, 16, "16 filters"),
        ("channel", CONV, 12, "12 channels"),
        ("spatial", CONV, 42, "7 parts × 6 parts"),
        ("data+filter", CONV, 128, "8 samples × 16 filters"),
        ("hybrid", DENSE, 24, "24 filters"),
        ("pipeline", CONV, None, "a stage for each layer"),
        ("data+pipeline", CONV, None, "8 samples × a stage for each layer"),
    ],
)
def test_limits(strategy: str, layer: str, most: int | None, why: str) -> None:
    assert explained(strategy, layer, 2).limit == (most, why)


@pytest.mark.parametrize(
    ("strategy", "layer", "ranks", "message"),
    [
        ("data", CONV, 16, r"data puts 16 along data, but conv 16x12x3x3 on 8x12x14x13 has 8 samples to share"),
        ("channel", STRIDED, 4, r"has 3 channels to share"),
        ("filter", CONV, 32, r"has 16 filters to share"),
        ("spatial", CONV, 128, r"parts of 2 rows along height"),
    ],
)
def test_too_many_ranks_are_refused_with_the_limit(strategy: str, layer: str, ranks: int, message: str) -> None:
    with pytest.raises(cm.PlanError, match=message):
        explained(strategy, layer, ranks)


@pytest.mark.parametrize("text", [CONV, STRIDED, VOLUME, DENSE, "conv 4x4x2x2 on 1x4x8x8 stride 2 padding 1"])
def test_layers_read_back_as_they_are_written(text: str) -> None:
    layer = parse_layer(text)
    assert str(layer) == text
    assert parse_layer(text.replace("x", "×")) == layer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conf 4x4x3x3 on 1x4x8x8", "must be a layer such as"),
        ("conv 4x4x3x3", "must be a layer such as"),
        ("conv 4x8x3x3 on 1x4x8x8", "did you mean conv 4x4x3x3"),
        ("conv 4x4x3x3 on 1x4x8", "a kernel of 2 dims needs an input of samples, channels and 2"),
        ("conv 4x4 on 1x4", "the weight of a conv must be filters x channels x kernel"),
        ("linear 4x4x3 on 1x4x8", "the weight of a linear must be filters x channels"),
        ("conv 4x4x9x9 on 1x4x4x4 padding 0", "the kernel is larger than the padded input"),
        ("conv 4x4x3x3 on 1x4x8x8 dilation 2", "'dilation' is not an option; the options are stride and padding"),
        ("conv 4x4x3x3 on 0x4x8x8", "at least 1"),
    ],
)
def test_bad_layers_are_refused_with_the_nearest_fix(text: str, message: str) -> None:
    with pytest.raises(cm.PlanError, match=message):
        parse_layer(text)


def test_the_picture_shows_what_ranks_hold_and_what_neighbours_read() -> None:
    layout = Layout.of(cm.Mesh(height=2, width=2), (2, 4, 8, 6), {2: "height", 3: "width"})
    boxes = tuple(layout.box(rank) for rank in range(4))
    assert picture(Tensor("x", "NCHW", layout.shape, boxes, (False, False, True, True))) == [
        "x 2×4×8×6, H·W cut",
        "       W 0:3    W 3:6",
        "      +--------+--------+",
        "H 0:4 |AAAAAAAa|bBBBBBBB|",
        "      |AAAAAAAa|bBBBBBBB|",
        "      |aaaaaaaa|bbbbbbbb|",
        "      +--------+--------+",
        "H 4:8 |cccccccc|dddddddd|",
        "      |CCCCCCCc|dDDDDDDD|",
        "      |CCCCCCCc|dDDDDDDD|",
        "      +--------+--------+",
    ]


def test_a_third_cut_dim_makes_grids_and_replicas_share_a_block() -> None:
    layout = Layout.of(cm.Mesh(depth=2, height=2, width=2), (1, 1, 4, 4, 4), {2: "depth", 3: "height", 4: "width"})
    lines = picture(Tensor("x", "NCDHW", layout.shape, tuple(layout.box(rank) for rank in range(8))))
    assert [line for line in lines if line.startswith("D")] == ["D 0:2", "D 2:4"]
    assert sum(line.count("|") == 3 for line in lines) == 4
    whole = picture(Tensor("w", "FC", (4, 4), (Box.whole((4, 4)),) * 3))
    assert whole == ["w 4×4, whole", " +--------+", " |  ABC   |", " +--------+"]


@pytest.mark.parametrize(("stages", "microbatches"), list(itertools.product((1, 2, 4), (1, 3, 6))))
def test_a_pipeline_diagram_has_the_bubble_of_the_formula(stages: int, microbatches: int) -> None:
    rows = slots(stages, microbatches)
    assert all(sum(bool(name) for name in row) == 2 * microbatches for row in rows)
    assert {len(row) for row in rows} == {2 * (microbatches + stages - 1)}


def test_the_page_has_every_part() -> None:
    text = str(explain("pipeline", parse_layer(CONV), cm.Mesh(pipe=2), system=cm.System.load("abci")))
    for part in (
        "every further stage: conv 16x16x3x3 on 8x16x14x13",
        "A |1",
        "(S−1)/(m+S−1)",
        "on abci:",
        "most ranks",
    ):
        assert part in text
    both = str(explain("data+pipeline", parse_layer(CONV), cm.Mesh(pipe=2, data=2)))
    assert "A |1" in both
    assert "C | .|1" in both
    many = str(explain("data", parse_layer("conv 4x4x3x3 on 64x4x8x8"), cm.Mesh(data=32)))
    assert "too many ranks to draw" in many
