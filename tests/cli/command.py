"""Runs the real command in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

USERS_MODULE = """
import torch
from torch import nn

def good():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
    def forward(self, x):
        return torch.digamma(torch.lgamma(self.conv(x)))

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return self.conv(x) * self.calls

def fails():
    raise OSError("no weights here")

def number():
    return 3
"""


def convmesh(*args: str, folder: Path | None = None, seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """Run `convmesh` with these arguments; its modules come from this checkout."""
    return subprocess.run(
        [sys.executable, "-m", "convmesh", *args], capture_output=True, text=True, cwd=folder, check=False,
        timeout=seconds, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
