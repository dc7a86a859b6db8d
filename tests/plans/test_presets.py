"""What each named strategy does with a network's layers."""

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import Mesh, PlanError, Split, models
from convmesh.graph import Graph, capture
from convmesh.plans import PresetOptions, preset, strategy_for


@pytest.fixture(scope="module")
def resnet() -> Graph:
    with torch.device("meta"):
        return capture(models.create("resnet50"), (32, 3, 224, 224)).graph


@pytest.fixture(scope="module")
def vgg() -> Graph:
    with torch.device("meta"):
        return capture(models.create("vgg16"), (32, 3, 224, 224)).graph


def test_data_cuts_samples_everywhere(resnet: Graph) -> None:
    splits = preset("data", resnet, Mesh(data=4)).splits
    assert {*splits.values()} == {Split(sample=("data",))}


def test_space_stops_where_rows_run_out_and_samples_go_on(resnet: Graph) -> None:
    made = preset("spatial", resnet, Mesh(height=4, width=2))
    first, last = next(iter(made.splits.values())), list(made.splits.values())[-3]
    assert first == Split(height=("height",), width=("width",))
    assert last == Split(width=("width",), sample=("height",)), "with 7 rows, 4 ranks would have fewer than two each"
    assert any("extent 7 gives 4 ranks fewer than 2 rows each" in note for note in made.notes)


def test_the_point_where_space_stops_can_be_set(resnet: Graph) -> None:
    name = next(name for name in preset("data", resnet, Mesh(data=2)).splits if name.startswith("stage3"))
    splits = preset("spatial", resnet, Mesh(height=2), PresetOptions(spatial_until=name)).splits
    names = list(splits)
    assert splits[names[names.index(name) - 1]].height == ("height",)
    assert not splits[name].height
    rows = preset("spatial", resnet, Mesh(height=2), PresetOptions(least_rows=20)).splits
    assert sum(bool(split.height) for split in rows.values()) < sum(bool(s.height) for s in splits.values())


def test_without_samples_enough_channels_go_on() -> None:
    with torch.device("meta"):
        graph = capture(models.create("resnet50"), (1, 3, 64, 64)).graph
    splits = preset("spatial", graph, Mesh(height=4)).splits
    assert list(splits.values())[-1] == Split(channel=("height",)), "the dense layer, of one sample"


def test_channels_are_cut_where_there_are_filters_enough(resnet: Graph) -> None:
    made = preset("data+filter", resnet, Mesh(data=2, filter=128))
    assert list(made.splits.values())[-1] == Split(sample=("data",), channel=("filter",))
    assert not next(iter(made.splits.values())).channel
    assert any("64 filters < 128 ranks" in note for note in made.notes)


def test_hybrid_cuts_dense_layers_by_filters_over_the_same_ranks(vgg: Graph) -> None:
    splits = preset("hybrid", vgg, Mesh(data=4)).splits
    dense = [node.layer for node in vgg.nodes if node.kind == "linear"]
    assert [splits[name] for name in dense] == [Split(channel=("data",))] * 3
    assert {split for name, split in splits.items() if name not in dense} == {Split(sample=("data",))}


def test_a_strategy_must_use_the_mesh(resnet: Graph) -> None:
    with pytest.raises(PlanError, match=r"'data'\) leaves axis 'height' of .* without work; use data\+spatial"):
        preset("data", resnet, Mesh(data=2, height=2))
    with pytest.raises(PlanError, match="must be one of data, spatial"):
        preset("datta", resnet, Mesh(data=2))


def test_auto_takes_what_uses_every_axis() -> None:
    found = [strategy_for(mesh) for mesh in (Mesh(data=2), Mesh(height=2), Mesh(data=2, filter=2), Mesh(pipe=2))]
    assert found == ["data", "spatial", "data+filter", "pipeline"]


def test_plans_need_no_processes_and_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv3d(1, 64, 3, padding=1), nn.Conv3d(64, 256, 3, padding=1))
    plan = cm.plan(model, (8, 1, 512, 512, 512), Mesh(data=8, depth=32, height=16, width=16), "data+spatial")
    program = cm.lower_plan(plan, rank=65_535).program
    assert program.nodes[-1].outputs[0].box(65_535).shape == (1, 256, 16, 32, 32)
    assert program.bytes_sent["neighbour"] > 0
