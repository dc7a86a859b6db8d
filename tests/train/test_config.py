"""A run file: strict keys, all mistakes at once, `extends`, and a resolved text that can be run again."""

from collections import OrderedDict
from pathlib import Path

import pytest
import tyro
from torch import nn

from convmesh import ConfigError, RunConfig
from convmesh.train.config_files import all_fields, config_of, load_config, resolved_text
from convmesh.train.datasets import test_source as held_out
from convmesh.train.datasets import training_source
from convmesh.train.planned import check_plan
from convmesh.train.run_config import DataConfig


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_is_a_run(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "run.toml", "")) == RunConfig()


def test_every_field_has_a_default_and_a_line_of_documentation() -> None:
    assert len(all_fields()) > 50
    for name, field in all_fields().items():
        assert not field.is_required(), name
        assert field.description, name
        assert "\n" not in field.description, name


def test_all_mistakes_are_told_at_once_with_the_nearest_names(tmp_path: Path) -> None:
    text = "epoch = 3\nbatch = 0\n[optimizer]\nlr = 'fast'\nmomentm = 0.9\n[checkpoint]\ncrop = [1]\n"
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, "run.toml", text))
    told = str(caught.value)
    assert "run.toml has 5 mistakes" in told
    assert "`epoch` is unknown; did you mean `epochs`?" in told
    assert "`batch` (=0) must be greater than or equal to 1" in told
    assert "`optimizer.lr` (='fast') must be a valid number" in told
    assert "`optimizer.momentm` is unknown; did you mean `momentum`?" in told
    assert "`checkpoint.crop` is unknown; did you mean `data.augment.crop`?" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("batch = 12\naccumulate = 5", "`accumulate` (=5) must divide `batch` (=12); use 4"),
        ("epochs = 0", "`epochs` and `steps` are both 0"),
        ("[optimizer]\nname = 'lars'\n[plan]\nreduction = 'sharded'", "needs whole weights"),
        ("[plan]\ncompression = 'powersgd-4'\nreduction = 'sharded'", "needs `plan.reduction` = 'bucketed'"),
        ("precision = 'fp16'\n[plan]\ncompression = 'powersgd-4'", "cannot be used with `precision` = 'fp16'"),
        ("[plan]\ncompression = 'zip'", "compression"),
        ("[schedule]\nname = 'step'", "needs `schedule.milestones`"),
        ("lr = 0.1", "did you mean `optimizer.lr`?"),
        ("epochs = true", "`epochs` (=True) must be a valid integer"),
        ("batch = ", "not TOML"),
        ("compile = 'max'", "`compile` (='max') must be true, false, inductor, max-autotune or eager"),
        ("precision = 'bfloat16'", "'amp-bf16'"),
        ("optimizer = 3", "`optimizer` (=3) must be a table: [optimizer]."),
        ("[plan]\nstrategy = 'spatiall'", "data+pipeline; did you mean spatial?"),
        ("[plan]\nmesh = { dept = 2 }", "channel, filter; did you mean depth?"),
        ("[plan]\nmesh = { depth = 0 }", "must have at least 1 rank along depth"),
    ],
)
def test_mistakes_name_the_rule_and_the_fix(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, "run.toml", text))
    assert told in str(caught.value)


def test_contradictions_are_told_beside_other_mistakes(tmp_path: Path) -> None:
    """But not those in which a value that is wrong by itself has a part."""
    text = "batch = 12\naccumulate = 5\nepoch = 2\n[schedule]\nname = 'step'\nmilestones = 'late'\n"
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, "run.toml", text))
    told = str(caught.value)
    assert "run.toml has 3 mistakes" in told
    assert "`epoch` is unknown; did you mean `epochs`?" in told
    assert "`accumulate` (=5) must divide `batch` (=12); use 4." in told
    assert "`schedule.milestones` (='late') must be a valid tuple" in told


def test_mistakes_of_a_file_below_are_told_with_its_name(tmp_path: Path) -> None:
    written(tmp_path, "base.toml", "batsh = 3\nbatch = 0\nseed = -1\n[optimizer]\nlr = -1\n")
    above = "extends = 'base.toml'\nseed = -1\nbatch = 8\n[optimizer]\nmomentm = 0.9\n"
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, "run.toml", above))
    below = f" It is in {tmp_path / 'base.toml'}."
    heading, *told = str(caught.value).splitlines()
    assert heading == f"{tmp_path / 'run.toml'} has 4 mistakes:"
    assert {line.strip().removesuffix(below): line.endswith(below) for line in told} == {
        "`seed` (=-1) must be greater than or equal to 0.": False,
        "`optimizer.lr` (=-1) must be greater than 0.": True,
        "`optimizer.momentm` is unknown; did you mean `momentum`?": False,
        "`batsh` is unknown; did you mean `batch`?": True,
    }


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfbatch = 8\n")
    assert load_config(tmp_path / "run.toml").batch == 8


def test_a_missing_file_offers_the_nearest_one(tmp_path: Path) -> None:
    written(tmp_path, "digits.toml", "")
    with pytest.raises(ConfigError, match=r"No such file.*Did you mean .*digits\.toml"):
        load_config(tmp_path / "digit.toml")


def test_extends_merges_sections_and_replaces_free_tables(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    written(
        tmp_path, "base.toml", "batch = 8\n[model]\nname = 'unet3d'\nargs = { filters = 8 }\n[data.augment]\nflip = 'D'"
    )
    above = "extends = '../base.toml'\n[model]\nargs = { levels = 2 }\n[data.augment]\nshift = 0.1"
    config = load_config(written(tmp_path / "deep", "run.toml", above))
    assert (config.batch, config.model.name, config.model.args) == (8, "unet3d", {"levels": 2})
    assert (config.data.augment.flip, config.data.augment.shift) == ("D", 0.1)


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "a.toml", "extends = 'b.toml'")
    written(tmp_path, "b.toml", "extends = 'a.toml'")
    with pytest.raises(ConfigError, match=r"leads back.*a\.toml -> b\.toml -> a\.toml"):
        load_config(tmp_path / "a.toml")


def test_the_resolved_text_stands_for_the_same_run(tmp_path: Path) -> None:
    written(tmp_path, "volumes.h5", "")
    text = "[data]\nsource = 'volumes.h5'\n[schedule]\nname = 'step'\nmilestones = [1, 2]\n[plan]\nmesh = { data = 2 }"
    config = load_config(written(tmp_path, "run.toml", text))
    again = load_config(written(tmp_path, "again.toml", resolved_text(config)))
    assert again == config
    assert again.data.source == str(tmp_path / "volumes.h5")


@pytest.mark.parametrize("name", ["digits", "cosmology", "fractals"])
def test_examples_are_valid(name: str) -> None:
    load_config(Path(__file__).parents[2] / "examples" / f"{name}.toml")


@pytest.mark.parametrize("text", ["true", "false", '"max-autotune"', '"eager"'])
def test_compile_names_a_backend_or_switches_it(tmp_path: Path, text: str) -> None:
    config = load_config(written(tmp_path, "run.toml", f"compile = {text}\n"))
    assert f"compile = {text}\n" in resolved_text(config)
    flag = text.strip('"')
    assert tyro.cli(RunConfig, args=["--compile", flag], default=RunConfig()) == config


@pytest.mark.parametrize(
    ("typed", "table"),
    [
        ("inputs=raw/vol, targets=lab", {"inputs": "raw/vol", "targets": "lab"}),
        ("size=8,norm='batch'", {"size": 8, "norm": "batch"}),
        ("{ deep=true, sizes=[3, 4], rate=1e-3, name=a.b-c }",
         {"deep": True, "sizes": [3, 4], "rate": 1e-3, "name": "a.b-c"}),
    ],
)  # fmt: skip
def test_tables_in_flags_need_no_quotes(typed: str, table: dict[str, object]) -> None:
    assert tyro.cli(RunConfig, args=["--model.args", typed], default=RunConfig()).model.args == table


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (
            {"mesh": {"depth": 2}},
            r"`plan.mesh` \(=\{'depth': 2\}\) is of 2 ranks, but 4 run; start them with `--ranks 2`",
        ),
        ({"recompute": ["con1*"]}, r"`plan.recompute` \(='con1\*'\) is unknown. Did you mean conv1"),
    ],
)
def test_plans_that_no_rank_could_follow_are_refused(plan: dict[str, object], told: str) -> None:
    model = nn.Sequential(OrderedDict(conv1=nn.Conv2d(1, 2, 3)))
    config = config_of({"plan": plan}, "test").plan
    with pytest.raises(ConfigError, match=told):
        check_plan(config, model, 4, None)
    if config.mesh:
        check_plan(config, model, 1, 2)  # one of two was lost: the mesh is chosen anew


def test_precisions_have_the_names_of_plans_too(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "run.toml", 'precision = "amp-bf16"\n'))
    assert config.precision == "bf16"
    assert 'precision = "bf16"\n' in resolved_text(config)
    assert tyro.cli(RunConfig, args=["--precision", "amp-fp16"], default=RunConfig()).precision == "fp16"


def test_tables_from_python_are_checked_too() -> None:
    assert config_of({"optimizer": {"betas": [0.8, 0.9]}}, "mine").optimizer.betas == (0.8, 0.9)
    with pytest.raises(ConfigError, match="mine: `stepps` is unknown; did you mean `steps`"):
        config_of({"stepps": 3}, "mine")


def test_settings_of_generators_are_told_with_the_field_that_has_them() -> None:
    with pytest.raises(ConfigError, match=r"^`data.args`: `sampls` \(=3\) is no setting of digits"):
        training_source(DataConfig(args={"sampls": 3}))
    with pytest.raises(ConfigError, match=r"^`data.test_args`: `samples` \(=0\) must be"):
        held_out(DataConfig(test_args={"samples": 0}))
