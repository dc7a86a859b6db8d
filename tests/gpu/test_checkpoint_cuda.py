"""Checkpoints of networks on a GPU: copies behind training, and other meshes and devices that continue the run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from convmesh import Mesh
from convmesh.testing import run_ranks
from tests.checkpoint.runs import continue_run, save_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

Case = tuple[Mesh, str, dict[str, Any]]

SHARDED: Case = (Mesh(data=2), "data", {"reduction": "sharded", "device": "cuda"})
FILTER: Case = (Mesh(filter=2), "filter", {"device": "cuda"})
HOST: Case = (Mesh(data=2), "data", {"device": "cpu"})


def check(folder: Path, saved: Case, loaded: Case, backend: str) -> None:
    expected = run_ranks(2, save_run, folder, *saved, backend=backend)[0]
    for losses in run_ranks(2, continue_run, folder, *loaded, backend=backend):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("saved", "loaded"), [(SHARDED, FILTER), (FILTER, SHARDED)])
def test_run_continues_on_another_mesh(tmp_path: Path, saved: Case, loaded: Case, backend: str) -> None:
    check(tmp_path, saved, loaded, backend)


@pytest.mark.parametrize(("saved", "loaded"), [(FILTER, HOST), (HOST, FILTER)])
def test_run_continues_on_another_device(tmp_path: Path, saved: Case, loaded: Case) -> None:
    check(tmp_path, saved, loaded, "gloo")
