"""One file for a single device, from the files of all ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import convmesh as cm
from convmesh import Checkpointer, Mesh
from convmesh.checkpoint import export_torch_checkpoint, export_weights, import_torch_checkpoint
from convmesh.cli.main import main
from tests.checkpoint.runs import Little, Run, fused
from tests.conftest import Pools


def save_two(folder: Path, mesh: Mesh, strategy: str, options: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    run, at = Run(mesh, strategy, **options), Checkpointer(folder, asynchronous=False)
    states = []
    for step in range(2):
        run.step(step)
        run.save(at, step)
        states.append(run.net.full_state_dict())
    return states


def test_export_is_the_single_devices_dictionary(
    pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = pools[4].run(save_two, tmp_path / "checkpoints", Mesh(data=2, filter=2), "data+filter", {})[0]
    file = tmp_path / "weights.safetensors"
    assert main(["export", str(tmp_path), "-o", str(file), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "step": 1, "path": str(file), "tensors": len(states[1]), "bytes": file.stat().st_size,
    }  # fmt: skip
    loaded = load_file(file)
    assert loaded.keys() == states[1].keys()
    assert all(torch.equal(loaded[name], value) for name, value in states[1].items())
    Little().double().load_state_dict(loaded)
    export_weights(tmp_path / "checkpoints", file, step=0)
    assert torch.equal(load_file(file)["enter.weight"], states[0]["enter.weight"])
    export_weights(tmp_path / "checkpoints" / "1", file)
    assert torch.equal(load_file(file)["enter.weight"], states[1]["enter.weight"])


def test_mistakes_are_one_line(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pools[1].run(save_two, tmp_path / "checkpoints", Mesh(data=1), "data", {})
    for arguments, said in {
        ("none", "-o", "w.safetensors"): "`run` (='none') has no checkpoint",
        (".", "-o", "w.safetensors", "--step", "7"): "`step` (=7) is not in '.'; there are 0, 1",
        (".", "-o", "no/w.safetensors"): "`--output` (='no/w.safetensors'): No such file",
    }.items():
        assert main(["export", *arguments]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert len(told.splitlines()) == 1


def save_large(folder: Path) -> None:
    model = nn.Linear(4096, 6144)
    net = cm.parallelize(model, cm.plan(model, (2, 4096), Mesh(data=1), "data"), loss=F.mse_loss)
    Checkpointer(folder, asynchronous=False).save(0, net)


MEASURED = """
import resource, sys
from convmesh.checkpoint import export_weights
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
print(export_weights(sys.argv[1], sys.argv[2]).bytes_size // 1024, peak() - before)
"""


def test_weights_are_never_whole_in_memory(pools: Pools, tmp_path: Path) -> None:
    pools[1].run(save_large, tmp_path)
    command = [sys.executable, "-c", MEASURED, str(tmp_path), str(tmp_path / "weights.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kilobytes, grown = map(int, done.stdout.split())
    assert kilobytes > 98_000
    assert grown < 64_000


def export_and_import(folder: Path, network: Any = Little) -> float:
    run = Run(Mesh(filter=2), "filter", network=network)
    run.steps(0, 2)
    export_torch_checkpoint(folder, run.net, run.optimizer)
    expected = run.net.full_state_dict()
    other = Run(Mesh(data=2), "data", network=network)
    import_torch_checkpoint(folder, other.net, other.optimizer)
    found = other.net.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    other.net.manual_seed(1)
    run.net.manual_seed(1)
    return abs(run.step(2) - other.step(2)) + abs(run.step(3) - other.step(3))


def test_torchs_checkpoints_are_written_and_read(pools: Pools, tmp_path: Path) -> None:
    assert max(pools[2].run(export_and_import, tmp_path)) < 1e-9


def test_torchs_checkpoints_know_fused_projections(pools: Pools, tmp_path: Path) -> None:
    assert max(pools[2].run(export_and_import, tmp_path, fused)) < 1e-9
