"""A run's token keeps strangers from its supervisors: real processes, which meet on this machine."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from convmesh.errors import RunError
from convmesh.supervise.run_token import FILE, VARIABLE, run_token
from convmesh.supervise.world import free_port
from tests.supervise.scripted import job
from tests.supervise.test_hosts import await_server

SECRET = "0123456789abcdef-of-a-test"


def supervisor(folder: Path, port: int) -> "subprocess.Popen[str]":
    """Of one of two hosts, with ranks that only count steps."""
    command = [sys.executable, "-m", "tests.supervise.scripted", str(folder), f"127.0.0.1:{port}"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def joining(folder: Path, port: int, **environment: str) -> "subprocess.CompletedProcess[str]":
    """`convmesh train`, which means to join whoever serves at the port."""
    (folder / "run.toml").write_text('batch = 8\n[model]\nname = "lenet5"\n')
    command = [sys.executable, "-m", "convmesh", "train", "run.toml", "--ranks", "1", "--run", "run"]
    place = ["--hosts", "2", "--rendezvous", f"127.0.0.1:{port}"]
    return subprocess.run(
        [*command, *place], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("environment", [{}, {VARIABLE: SECRET}])
def test_a_stranger_is_refused_and_the_run_goes_on(environment: dict[str, str], tmp_path: Path) -> None:
    """With the token of a folder of its own, and with one that it was given."""
    ours, theirs, port = tmp_path / "ours", tmp_path / "theirs", free_port()
    theirs.mkdir()
    job(ours)
    first = supervisor(ours, port)
    assert first.stderr is not None
    await_server(port)
    refused = joining(theirs, port, **environment)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert f"the supervisor at 127.0.0.1:{port} has another token than this one" in refused.stderr
    assert SECRET not in refused.stderr
    second = supervisor(ours, port)
    assert [each.wait(120) for each in (first, second)] == [0, 0]
    said = [line for line in first.stderr.read().splitlines() if "waits for 2 hosts" not in line]
    assert said == [], "it never heard of the stranger"
    for each in (first, second):
        each.communicate()


def test_all_who_come_at_once_have_the_same_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = {token.secret for token in pool.map(run_token, [tmp_path / "run"] * 64)}
    assert len(found) == 1
    assert len(found.pop()) == 64
    assert [path.name for path in (tmp_path / "run").iterdir()] == [FILE]
    assert stat.S_IMODE((tmp_path / "run" / FILE).stat().st_mode) == 0o600
    assert run_token(tmp_path / "other").secret != run_token(tmp_path / "run").secret


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    run_token(tmp_path)
    (tmp_path / FILE).chmod(0o640)
    with pytest.raises(RunError, match=r"readable by nobody else \(`chmod 600`\)"):
        run_token(tmp_path)


def test_a_token_that_is_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(RunError, match="`CONVMESH_TOKEN` has 5 characters; a token needs at least 16"):
        run_token(tmp_path)
    run_token(tmp_path)
    (tmp_path / FILE).write_text("")
    with pytest.raises(RunError, match="too short"):
        run_token(tmp_path)


def test_a_given_token_is_not_handed_on_to_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    token = run_token(tmp_path)
    assert token.secret == SECRET.encode()
    assert VARIABLE not in os.environ
    assert SECRET not in repr(token)
    assert not (tmp_path / FILE).exists()
