"""A run continues on another mesh, plan or number of ranks with the losses that it would have had."""

from pathlib import Path
from typing import Any

import pytest
import torch

from convmesh import Mesh
from tests.checkpoint.runs import continue_run, save_run
from tests.conftest import Pools

Case = tuple[Mesh, Any, dict[str, Any]]

CASES: dict[str, Case] = {
    "one": (Mesh(data=1), "data", {}),
    "data": (Mesh(data=2), "data", {}),
    "sharded": (Mesh(data=2), "data", {"reduction": "sharded"}),
    "root": (Mesh(data=2), "data", {"reduction": "broadcast"}),
    "spatial": (Mesh(height=2, width=2), "spatial", {}),
    "filter": (Mesh(filter=4), "filter", {}),
    "channel": (Mesh(channel=2), "channel", {}),
    "hybrid": (Mesh(data=2), "hybrid", {}),
    "data+filter, sharded": (Mesh(data=2, filter=2), "data+filter", {"reduction": "sharded"}),
}


def check(pools: Pools, folder: Path, saved: Case, loaded: Case) -> None:
    expected = pools[saved[0].size].run(save_run, folder, *saved)[0]
    for losses in pools[loaded[0].size].run(continue_run, folder, *loaded):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=1e-9)


ROUND = list(CASES)


@pytest.mark.parametrize(("saved", "loaded"), list(zip(ROUND, ROUND[1:] + ROUND[:1], strict=True)))
def test_run_continues_elsewhere(pools: Pools, tmp_path: Path, saved: str, loaded: str) -> None:
    check(pools, tmp_path, CASES[saved], CASES[loaded])
