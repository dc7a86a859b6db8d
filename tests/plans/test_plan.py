"""Plans as values and as files: they round-trip, and every mistake is named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import Mesh, Plan, PlanError, Split, load_plan
from convmesh.graph import capture
from convmesh.plans import Pipeline, split_of
from convmesh.plans.plan_file import loads
from convmesh.plans.plan_text import dumps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.decoder = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decoder(self.encoder(x))
        return result


MESH = Mesh(data=2, height=2, filter=2)
PLAN = Plan(
    mesh=MESH,
    splits=(
        ("*", Split(sample=("data",), height=("height",))),
        ("decoder", Split(sample=("data", "height"), channel=("filter",), algorithm="x")),
    ),
    shapes=((8, 3, 16, 16),),
    batchnorm="replica",
    checkpoint=("encoder",),
    pipeline=Pipeline(starts=("decoder",), microbatches=4, schedule="gpipe"),
    signature="abc",
)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.toml")
    assert load_plan(tmp_path / "plan.toml") == PLAN


def test_a_plan_made_from_a_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = cm.plan(Net(), (8, 3, 16, 16), MESH, {"*": {"sample": "data"}, "decoder": {"channel": "filter"}})
    made.save(tmp_path / "plan.toml")
    read = load_plan(tmp_path / "plan.toml")
    assert {layer: read.split(layer) for layer in ("encoder.0", "decoder")} == {
        layer: made.split(layer) for layer in ("encoder.0", "decoder")
    }
    assert made.split("decoder").algorithm == "y", "an algorithm that was left open is named in the plan"
    read.check(capture(Net(), (8, 3, 16, 16)).graph)


def test_a_hierarchical_reduction_is_read_as_it_was_written() -> None:
    mesh = Mesh(data=4)
    plan = Plan(mesh=mesh, splits=(("*", Split(sample=("data",))),), reduction="hierarchical", ranks_per_host=2)
    assert 'reduction = "hierarchical"\nranks_per_host = 2\n' in str(plan)
    assert loads(str(plan)) == plan
    assert "ranks_per_host" not in str(replace(plan, reduction="bucketed", ranks_per_host=1))


def test_the_text_is_short_and_readable() -> None:
    splits = {f"layer{i}": Split(sample=("data",)) for i in range(9)} | {"head": Split(channel=("filter",))}
    text = dumps(Plan(mesh=MESH, splits=tuple(splits.items()), strategy="data+filter"))
    assert '"*" = { sample = "data" }' in text
    assert '"head" = { channel = "filter", algorithm = "auto" }' in text
    assert "layer3" not in text


def test_exact_names_count_before_patterns_and_later_patterns_before_earlier() -> None:
    a, b, c = (Split(sample=("data",)), Split(height=("height",)), Split(channel=("filter",)))
    plan = Plan(mesh=MESH, splits=(("decoder", c), ("*", a), ("enc*", b)))
    assert (plan.split("other"), plan.split("encoder.0"), plan.split("decoder")) == (a, b, c)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = [", "not TOML"),
        ("[mesh]\ndata = 2", r"needs a \[mesh\]"),
        (
            '[mesh]\ndata = 2\n[layers]\n"*" = { sampel = "data" }',
            "layer '\\*': a split has no 'sampel'; it has sample",
        ),
        ('[mesh]\ndata = 2\n[layers]\n"*" = { height = "height" }', "cut by axis 'height', but the plan's mesh is"),
        ('[mesh]\ndata = 2\n[layers]\n"*" = { sample = "rows" }', "axis 'rows' is no mesh axis"),
        ('[mesh]\ndata = 0\n[layers]\n"*" = {}', "`data` \\(=0\\) must be a positive whole number"),
        ('depth = 3\n[mesh]\ndata = 2\n[layers]\n"*" = {}', "a plan has no 'depth'"),
        ('[mesh]\ndata = 2\n[layers]\n"a" = { sample = "data", height = "data" }', "'data' cuts two dims"),
        (
            '[mesh]\ndata = 2\n[pipeline]\nschedule = "2f2b"\n[layers]\n"*" = {}',
            "`schedule` \\(='2f2b'\\) must be one of",
        ),
        (
            'compression = "zip"\n[mesh]\ndata = 2\n[layers]\n"*" = {}',
            "`compression` \\(='zip'\\) must be one of none, bf16",
        ),
        (
            'reduction = "hierarchical"\n[mesh]\ndata = 4\n[layers]\n"*" = {}',
            "`reduction` \\(='hierarchical'\\) does not go with `ranks_per_host` \\(=1\\)",
        ),
        (
            'ranks_per_host = 2\n[mesh]\ndata = 4\n[layers]\n"*" = {}',
            "`reduction` \\(='bucketed'\\) does not go with `ranks_per_host` \\(=2\\)",
        ),
        (
            'reduction = "hierarchical"\nranks_per_host = 4\n[mesh]\ndata = 6\n[layers]\n"*" = {}',
            "`ranks_per_host` \\(=4\\) must divide the 6 ranks of",
        ),
        (
            'compression = "powersgd-2"\nreduction = "sharded"\n[mesh]\ndata = 2\n[layers]\n"*" = {}',
            "`compression` \\(='powersgd-2'\\) needs `reduction` 'bucketed' \\(it is 'sharded'\\)",
        ),
        ('batchnorm = "local"\n[mesh]\ndata = 2\n[layers]\n"*" = {}', "`batchnorm` \\(='local'\\) must be one of"),
    ],
)
def test_mistakes_in_a_file_are_named(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        loads(text, "my.toml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere.toml'\): No such file"):
        load_plan(tmp_path / "nowhere.toml")


def test_axes_of_one_rank_cut_nothing() -> None:
    read = loads('[mesh]\ndata = 2\nheight = 1\n[layers]\n"*" = { sample = "data", height = "height" }')
    assert read.split("any") == Split(sample=("data",))


def test_plans_for_other_networks_are_refused() -> None:
    graph = capture(Net(), (8, 3, 16, 16)).graph
    cut = Split(sample=("data",))
    with pytest.raises(
        PlanError, match="the plan has layer 'decodr', but the network has none; the nearest is 'decoder'"
    ):
        Plan(mesh=MESH, splits=(("*", cut), ("decodr", cut))).check(graph)
    with pytest.raises(PlanError, match=r"no split for layer 'encoder.1' of the network"):
        Plan(mesh=MESH, splits=(("encoder.0", cut), ("decoder", cut))).check(graph)
    with pytest.raises(PlanError, match="made for another network"):
        Plan(mesh=MESH, splits=(("*", cut),), signature="0123").check(graph)


def test_splits_say_what_they_cut() -> None:
    split = split_of({"sample": ["data", "height"], "channel": "filter", "algorithm": "y"}, "layer")
    assert str(split) == "sample:data*height channel:filter(y)"
    assert split.cut(4) == {0: ("data", "height")}
    assert Split(depth=("depth",), width=("width",)).cut(5) == {2: ("depth",), 4: ("width",)}
    assert Split(width=("width",)).cut(3) == {2: ("width",)}
    assert str(Split()) == "whole"
