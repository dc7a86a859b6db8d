"""What is in the folder: which checkpoints stay, and how evenly the ranks share the work."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import convmesh as cm
import convmesh.checkpoint
from convmesh import Checkpointer, Mesh
from convmesh.checkpoint import choosing
from convmesh.checkpoint.box_reader import BoxReader
from convmesh.checkpoint.manifest import read_manifest
from convmesh.layout import Box
from convmesh.layout.runs import boxes_of_run
from tests.checkpoint.runs import Little, Run
from tests.conftest import Pools


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_of_a_run(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = boxes_of_run(shape, start, stop)
    values = torch.cat([whole[box.slices()].flatten() for box in boxes]) if boxes else torch.empty(0, dtype=torch.int64)
    assert values.tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def keep_some(folder: Path, keep: int | None) -> list[list[int]]:
    run, at = Run(Mesh(data=2), "data"), Checkpointer(folder, keep)
    seen = []
    assert run.load(at) == 0
    for step in (1, 2, 3):
        run.save(at, step)
        at.wait()
        seen.append(at.steps())
    run.load(at, step=3)
    run.save(at, 2)  # the run went back, and comes by again
    at.wait()
    assert run.load(at) == 2
    return [*seen, at.steps(), [int((folder / "latest").read_text())]]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (1, [[1], [2], [3], [2], [2]]),
        (2, [[1], [1, 2], [2, 3], [2, 3], [2]]),
        (None, [[1], [1, 2], [1, 2, 3], [1, 2, 3], [2]]),
    ],
)
def test_old_checkpoints_go(pools: Pools, tmp_path: Path, keep: int | None, left: list[list[int]]) -> None:
    (found, _) = pools[2].run(keep_some, tmp_path, keep)
    assert found == left


def save_once(folder: Path, mesh: Mesh, strategy: str, options: dict[str, Any]) -> None:
    run, at = Run(mesh, strategy, **options), Checkpointer(folder)
    run.step(0)
    (folder / ".incomplete-1").mkdir(parents=True, exist_ok=True)
    (folder / ".incomplete-1" / "rank-00007.safetensors").touch()  # of a larger job that died
    run.save(at, 1)
    at.wait()


def test_ranks_share_the_bytes_evenly(pools: Pools, tmp_path: Path) -> None:
    pools[4].run(save_once, tmp_path, Mesh(data=4), "data", {"reduction": "sharded"})
    folder = tmp_path / "1"
    manifest = read_manifest(folder)
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *manifest.files}
    assert list(manifest.files) == [f"rank-0000{rank}.safetensors" for rank in range(4)]
    assert all(entry.is_complete for entry in manifest.tensors.values())
    written = dict.fromkeys(manifest.files, 0)
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            if not name.startswith("random/host"):
                written[piece.file] += piece.box.size * (1 if name.startswith("random") else 8)
    assert max(written.values()) - min(written.values()) < 64


def test_manifest_is_plain_json(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(save_once, tmp_path, Mesh(filter=2), "filter", {})
    plain = json.loads((tmp_path / "1" / "manifest.json").read_text())
    assert plain["version"] == 1
    assert plain["world"] == 2
    assert plain["mesh"] == {"filter": 2}
    assert plain["tensors"]["net/enter.weight"] == {
        "shape": [6, 2, 3, 3],
        "dtype": "F64",
        "boxes": [
            ["rank-00000.safetensors", "net/enter.weight@0,0,0,0", [[0, 3], [0, 2], [0, 3], [0, 3]]],
            ["rank-00001.safetensors", "net/enter.weight@3,0,0,0", [[3, 6], [0, 2], [0, 3], [0, 3]]],
        ],
    }
    assert plain["shared"] == {"again.weight": "twice.weight"}
    assert plain["optimizer"]["kind"] == "AdamW"
    assert plain["state"]["step"] == 1


def load_without_memory(folder: Path) -> float:
    """A network that was made without memory gets it when it is loaded."""
    with torch.device("meta"):
        model = Little().double()
    net = cm.parallelize(model, cm.plan(model, (8, 2, 8, 8), Mesh(filter=2), "filter"), loss=F.cross_entropy)
    at = Checkpointer(folder)
    assert at.load(net) is not None
    other = Run(Mesh(data=2), "data")
    other.load(at)
    wanted = other.net.full_state_dict()
    return max(float((value - wanted[name]).abs().max()) for name, value in net.full_state_dict().items())


def test_net_without_memory_is_loaded(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(save_once, tmp_path, Mesh(data=2), "data", {})
    assert pools[2].run(load_without_memory, tmp_path) == [0.0, 0.0]


class Counted(BoxReader):
    """Counts the values that it reads."""

    count = 0

    def _slice(self, piece: Any, inner: Box) -> torch.Tensor:
        Counted.count += inner.size
        return super()._slice(piece, inner)


def count_read(folder: Path) -> tuple[int, int]:
    """Values read, and values held."""
    run = Run(Mesh(filter=4), "filter")
    choosing.BoxReader = Counted  # type: ignore[attr-defined]
    try:
        run.load(Checkpointer(folder))
    finally:
        choosing.BoxReader = BoxReader  # type: ignore[attr-defined]
    tensors = [*run.net.state_dict().values()]
    states = [value for state in run.optimizer.state.values() for value in state.values() if value.dim()]
    local = [t.to_local() if isinstance(t, torch.distributed.tensor.DTensor) else t for t in [*tensors, *states]]
    return Counted.count, sum(t.numel() for t in local)


def test_a_rank_reads_only_its_boxes(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(save_once, tmp_path, Mesh(data=2), "data", {})
    random = 2 * torch.get_rng_state().numel()
    for read, held in pools[4].run(count_read, tmp_path):
        assert read <= held + random


def test_nothing_is_unpickled() -> None:
    """Torch's own format is, and says so; it has a file of its own."""
    sources = {path.name: path.read_text() for path in Path(convmesh.checkpoint.__file__).parent.glob("*.py")}
    users = [
        name
        for name, text in sources.items()
        if re.search(r"distributed\.checkpoint|pickle\b.*import|torch\.load\(", text)
    ]
    assert users == ["torch_format.py"]
