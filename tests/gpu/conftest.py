"""Tests with several ranks run twice: Gloo stages messages through the host, NCCL sends them from the GPU."""

import os
from pathlib import Path

import pytest


def nccl_takes_several() -> bool:
    """Whether NCCL lets ranks share the GPU (from 2.30 on, where asked to), or there is a GPU for each of four."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" or len([*Path("/dev").glob("nvidia[0-9]*")]) >= 4


@pytest.fixture(params=["gloo", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    if chosen == "nccl" and not nccl_takes_several():
        pytest.skip("NCCL needs a GPU for each rank, or 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1")
    return chosen
