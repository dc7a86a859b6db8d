"""Help, verbs and exit statuses, whatever the verb."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from convmesh.cli import main as command
from convmesh.cli.exits import EXPLAINED, Exit
from convmesh.cli.interrupts import shuts_down_on_signals
from convmesh.cli.main import VERBS
from convmesh.cli.warning_lines import warns_in_a_line
from convmesh.errors import DataWarning


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in VERBS)])
def test_help_answers_without_torch(args: list[str]) -> None:
    code = (
        "import sys; from convmesh.cli import main\n"
        f"try: status = main({args!r})\n"
        "except SystemExit as stop: status = stop.code\n"
        "sys.exit(status or int('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " ".join(EXPLAINED.split()) in " ".join(done.stdout.split())


def test_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and verb.summary in shown for name, verb in VERBS.items())


def test_nothing_typed_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([]) == Exit.BAD_INPUT
    assert "usage" in capsys.readouterr().out


def test_warnings_of_ours_are_a_line_and_others_stay() -> None:
    with warns_in_a_line():
        ours, other = (
            warnings.formatwarning("it is slow.", kind, "code.py", 3, "") for kind in (DataWarning, FutureWarning)
        )
    assert ours == "convmesh: warning: it is slow.\n"
    assert other.startswith("code.py:3: FutureWarning: it is slow.")
    assert "code.py" in warnings.formatwarning("it is slow.", DataWarning, "code.py", 3, "")


def test_an_unknown_verb_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["verfy"]) == Exit.BAD_INPUT
    assert "did you mean verify?" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--version"]) == 0
    assert capsys.readouterr().out.startswith("convmesh ")


def test_a_missing_option_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command(["verify", "lenet5"])
    assert stop.value.code == Exit.BAD_INPUT
    shown = capsys.readouterr()
    assert "--ranks" in shown.err
    assert shown.out == ""


def test_our_bugs_are_admitted_and_saved_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from convmesh.cli import verify_verb

    def run(options: verify_verb.VerifyOptions) -> int:
        raise ZeroDivisionError("never")

    monkeypatch.setattr(verify_verb, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert command(["verify", "lenet5", "--ranks", "2"]) == Exit.BUG
    shown = capsys.readouterr().err
    assert "this is a bug in ConvMesh (ZeroDivisionError: never)" in shown
    with open(shown.split()[-1], encoding="utf-8") as report:
        assert "Traceback" in report.read()


def test_an_interrupt_that_a_callback_swallows_is_raised_again() -> None:
    """Python prints and drops what a signal raises in a callback; without the repeat this would hang."""

    @shuts_down_on_signals()
    def swallow_one() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        swallow_one()
