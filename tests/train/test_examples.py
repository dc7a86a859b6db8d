"""The shipped run files reach what they promise, on real ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convmesh.train.config_files import load_config
from tests.cli.command import convmesh
from tests.conftest import Pools
from tests.train.runs import lines, losses, ran

EXAMPLES = Path(__file__).parents[2] / "examples"


def reached(name: str, ranks: int, folder: Path, *flags: str) -> dict[str, Any]:
    done = convmesh(
        "train", str(EXAMPLES / f"{name}.toml"), "--ranks", str(ranks), "--run", str(folder), *flags, seconds=1800
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["eval"]
    return found


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_digits_end_with_the_same_accuracy_under_every_plan(tmp_path: Path) -> None:
    strategies = ("data", "spatial", "filter", "hybrid")
    found = [reached("digits", 2, tmp_path / name, "--plan.strategy", name)["accuracy"] for name in strategies]
    assert min(found) >= 0.98
    assert len({*found}) == 1


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_cosmology(tmp_path: Path) -> None:
    assert min(reached("cosmology", 4, tmp_path / "run")["r2_outputs"]) >= 0.9


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_fractals(tmp_path: Path) -> None:
    assert reached("fractals", 2, tmp_path / "run")["dice"] >= 0.9


def test_small_cosmology_has_the_curve_of_one_process_on_four_ranks(pools: Pools, tmp_path: Path) -> None:
    """The example with volumes of 16³, in float64: losses and evaluations, over epochs that read from ranks' memory."""
    tables = load_config(EXAMPLES / "cosmology.toml").model_dump()
    tables |= {"batch": 8, "epochs": 3, "precision": "fp64"}
    tables["data"] |= {"args": {"size": 16, "samples": 24}, "test_args": {"samples": 6}}
    tables["evaluation"] |= {"every_epochs": 1}
    tables["plan"] |= {"predict": False}
    summary = pools[4].run(ran, tables, str(tmp_path / "four"))[0]
    assert summary["mesh"] == {"data": 2, "depth": 2}
    pools[1].run(ran, tables, str(tmp_path / "one"))
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    for name in ("loss", "r2_outputs"):
        judged = [[line["eval"][name] for line in lines(tmp_path / run) if "eval" in line] for run in ("one", "four")]
        assert len(judged[0]) == 3
        assert np.allclose(judged[0], judged[1], rtol=1e-9, atol=0)


def test_small_fractals_are_learnt(pools: Pools, tmp_path: Path) -> None:
    """The task of the fractals example on volumes of 12³ with one kind of fractal."""
    tables: dict[str, Any] = {
        "batch": 4, "epochs": 12, "precision": "fp32", "loss": "dice+cross_entropy",
        "model": {"name": "unet3d", "args": {"classes": 2, "filters": 8, "levels": 2}},
        "data": {
            "source": "fractals", "args": {"size": 12, "samples": 24, "classes": 2, "fractals": 2},
            "test_source": "", "test_args": {"samples": 6}, "augment": {"intensity": 0.0, "flip": ""}, "store_gib": 0.1,
        },
        "plan": {"strategy": "spatial"}, "optimizer": {"lr": 0.02}, "evaluation": {"every_epochs": 0},
    }  # fmt: skip
    summary = pools[2].run(ran, tables, str(tmp_path))[0]
    assert summary["eval"]["dice"] > 0.85
