"""Small runs for tests: a data set in memory, a network with dropout and batch norm, and what a run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from convmesh import RunConfig
from convmesh.train.config_files import config_of
from convmesh.train.training import train_run

HERE = "tests.train.runs"


def images(samples: int = 22, seed: int = 0) -> TensorDataset:
    """Images and classes; 22 samples make five batches of four, and two are left over."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 8, 8, generator=draws)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def maps(samples: int = 6, seed: int = 0) -> TensorDataset:
    """Images, and a class for every pixel."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 8, 8, generator=draws)
    return TensorDataset(x, (x[:, 0] > 0.3).long() + (x[:, 0] > 1).long())


def classifier() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))


def config(**changes: Any) -> RunConfig:
    """Three epochs of five steps in float64; `changes` are sections or fields."""
    tables: dict[str, Any] = {
        "batch": 4,
        "epochs": 3,
        "precision": "fp64",
        "seed": 3,
        "model": {"name": f"{HERE}:classifier"},
        "data": {
            "source": f"{HERE}:images",
            "test_source": f"{HERE}:images",
            "test_args": {"samples": 7, "seed": 1},
            "augment": {"flip": "HW", "intensity": 0.2},
        },
        "plan": {"strategy": "data", "predict": False},
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
        "schedule": {"warmup_epochs": 0.5},
    }
    for key, value in changes.items():
        tables[key] = {**tables.get(key, {}), **value} if isinstance(value, dict) else value
    return config_of(tables, "test")


def ran(tables: dict[str, Any], folder: str, resume: bool = False) -> dict[str, Any]:
    """On a rank: the summary of a run."""
    return train_run(config(**tables), Path(folder), resume)[0]


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder)]


def smooth() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(256, 2))


def painter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1))


def spoiled() -> TensorDataset:
    """Images of which one has a value that is no number."""
    found = images()
    found.tensors[0][17, 0, 3, 3] = torch.nan
    return found


def coloured() -> TensorDataset:
    """Images of three channels."""
    x, classes = images().tensors
    return TensorDataset(x.expand(-1, 3, -1, -1), classes)
