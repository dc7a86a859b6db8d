"""Files of every kind, a little wrong, are read or refused; `make test-fuzz` tries more of them for an hour."""

from pathlib import Path

import pytest

from tests.draws import examples
from tests.fuzz.targets import Target, targets
from tests.fuzz.trials import tried


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    return targets(tmp_path_factory.mktemp("fuzz"))


def test_changed_files_are_read_or_refused(kinds: list[Target]) -> None:
    assert [failure for target in kinds for failure in tried(target, range(examples(50)))] == []


def test_files_as_they_are_written_are_read(kinds: list[Target]) -> None:
    for target in kinds:
        target.read(target.file)


def test_crashes_hangs_and_other_errors_are_told(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        if b"\xff" in path.read_bytes():
            raise KeyError("one of ours would say more")

    (tmp_path / "file").write_bytes(b"0123456789")
    failures = tried(Target("some", tmp_path / "file", read), range(200))
    assert failures
    assert all("KeyError" in failure.what for failure in failures)
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    (crash,) = tried(Target("some", tmp_path / "file", lambda _: __import__("os").abort()), range(1))
    assert crash.what == "the process ended with SIGABRT"
