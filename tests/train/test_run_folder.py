"""A run folder has one run at a time, and loses nothing."""

import json
from pathlib import Path

import pytest

from convmesh import RunError, UnwritableError
from convmesh.train.run_folder import RunFolder


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run", resume=False)
    with pytest.raises(RunError, match=r"in use by process \d+ on"):
        RunFolder(tmp_path / "run", resume=True)
    first.close()
    RunFolder(tmp_path / "run", resume=False).close()


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(RunError, match="holds an earlier run; go on with it by `--resume`"):
        RunFolder(tmp_path, resume=False)
    RunFolder(tmp_path, resume=True).close()


def test_metrics_go_on_after_the_step_that_was_saved(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']), encoding="utf-8")
    folder = RunFolder(tmp_path, resume=True)
    folder.start_metrics(2)
    folder.add_metrics({"step": 3, "loss": 0.5})
    folder.close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert kept == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 0.5}]


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="it is a file; name a folder"):
        RunFolder(tmp_path / "file", resume=False)


def test_metrics_on_a_full_disk_end_the_run_with_a_message(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, resume=True)
    folder._metrics = open("/dev/full", "w", encoding="utf-8", buffering=1)  # noqa: SIM115
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        folder.add_metrics({"step": 1})
    folder.close()


def test_metrics_that_cannot_be_begun_end_the_run_with_a_message(tmp_path: Path) -> None:
    """As on a disk that has no room for another file, or whose quota is used up."""
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "gone" / "metrics.jsonl")
    folder = RunFolder(tmp_path, resume=True)
    with pytest.raises(UnwritableError, match=r"metrics\.jsonl cannot be written: No such file or directory"):
        folder.start_metrics(0)
    folder.close()
