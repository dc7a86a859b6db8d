"""The shipped run files reach what they promise, on real ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import convmesh
from tests.conftest import Pools
from tests.train.runs import ran

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
