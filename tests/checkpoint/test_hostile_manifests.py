"""A manifest that somebody else wrote, with a right digest: a value or one clear error, and nothing outside is read."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convmesh import CheckpointError
from convmesh.checkpoint.manifest import _digest, read_manifest
from convmesh.checkpoint.restoring import WEIGHTS
from convmesh.checkpoint.weights_export import export_weights
from tests.checkpoint.test_damage import saved  # noqa: F401  (a fixture)

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 1 << 70), st.floats(), st.text(max_size=4), st.just([]), st.just({}),
    st.sampled_from(["../../secret", "/etc/passwd", "a\0b", "F128", 1 << 62, [[0, 1 << 62]], {"a": {"a": []}}]),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places of nested lists and tables."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def write(folder: Path, plain: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps({**plain, "sha256": _digest(plain)}))


def changed(plain: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    forged = copy.deepcopy(plain)
    inner = forged
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return forged


@pytest.mark.usefixtures("saved")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_forged_manifest_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "checkpoints" / "3"
    original = folder / "original.json"
    if not original.exists():
        original.write_bytes((folder / "manifest.json").read_bytes())
    plain = json.loads(original.read_text())
    plain.pop("sha256")
    place = data.draw(st.sampled_from([each for each in places(plain) if each]))
    write(folder, changed(plain, place, data.draw(ODD)))
    with contextlib.suppress(CheckpointError):
        export_weights(folder, tmp_path / "weights.safetensors")


@pytest.mark.usefixtures("saved")
def test_files_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "3"
    plain = json.loads((folder / "manifest.json").read_text())
    plain.pop("sha256")
    name = next(iter(plain["files"]))
    for outside in (f"../2/{name}", str(folder / name)):
        text = json.dumps(plain).replace(json.dumps(name), json.dumps(outside))
        write(folder, json.loads(text))
        with pytest.raises(CheckpointError, match="must be the name of a file in the checkpoint's folder"):
            read_manifest(folder)


@pytest.mark.usefixtures("saved")
def test_sizes_that_no_file_holds_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "3"
    plain = json.loads((folder / "manifest.json").read_text())
    plain.pop("sha256")
    name, tensor = next((name, each) for name, each in plain["tensors"].items() if each["shape"])
    tensor["shape"][0] = 1 << 40
    write(folder, plain)
    with pytest.raises(CheckpointError, match="more than its files hold"):
        read_manifest(folder)
    assert name


@pytest.mark.usefixtures("saved")
def test_values_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "3"
    plain = json.loads((folder / "manifest.json").read_text())
    plain.pop("sha256")
    weights = [each for name, each in plain["tensors"].items() if name.startswith(WEIGHTS)]
    tensors = sorted(weights, key=lambda each: len(each["shape"]))
    tensors[-1]["boxes"][0][:2] = tensors[0]["boxes"][0][:2]
    write(folder, plain)
    with pytest.raises(CheckpointError, match=r"where the manifest has|cannot be read"):
        export_weights(folder, tmp_path / "weights.safetensors")
