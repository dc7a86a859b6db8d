"""Files that people wrote: whatever is in them, reading them gives a value or one of our errors in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convmesh as cm
from convmesh import ConfigError, PlanError, RunsFileError, SystemFileError
from convmesh.cli.main import main
from convmesh.plans.plan_file import loads
from convmesh.plans.plan_text import dumps
from convmesh.toml_files import NotTomlError, parse_toml
from convmesh.train.config_files import load_config, resolved_text
from convmesh.train.run_config import RunConfig
from convmesh.validation.runs_file import NEEDED, read_runs

DIGITS = "9" * 5000
PLAN = '[mesh]\ndata = 2\n[layers]\n"*" = { sample = "data" }\n'
RUN = {
    "role": "anchor", "system": "abci", "gpus": "4", "model": "resnet50", "precision": "fp32", "strategy": "data=4",
    "global_batch": "128", "step_ms": "300",
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a = '\xff'", "byte 0xff at 5 is not UTF-8"),
        ("a = 'ä'".encode("utf-16"), "is not UTF-8"),
        (f"a = {DIGITS}".encode(), "not TOML: "),
        (f"a = 0x{DIGITS}".encode(), "`a` is a whole number of more than 64 bits"),
        (f"[a]\nb = [1, -{'9' * 20}]".encode(), "`a.b` is a whole number of more than 64 bits"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"a = = 1", "Invalid value"),
        (b"a = 2026-99-99", "not TOML"),
        (b"\x00", "not TOML"),
    ],
    ids=["latin", "utf-16", "digits", "hexadecimal", "inner", "nested", "syntax", "date", "zero"],
)
def test_what_is_not_toml_is_said_in_one_line(data: bytes, says: str) -> None:
    with pytest.raises(NotTomlError, match=says) as error:
        parse_toml(data)
    assert "\n" not in str(error.value)


def ended(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What a command that must end with status 2 writes."""
    assert main(args) == 2
    written = capsys.readouterr()
    assert "Traceback" not in written.err
    return written.err


@pytest.mark.parametrize("written", [b"\xff\xfe", f"x = {DIGITS}".encode(), b"[mesh]\ndata = 1e999\n[layers]\n"])
def test_commands_end_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], written: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(written)
    for command in (
        ["verify", "lenet5", "--ranks", "2", "--plan", str(path)],
        ["plan", "lenet5", "--gpus", "2", "--system", str(path)],
    ):
        assert "bad.toml" in ended(capsys, *command)


def test_validate_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [",".join(RUN), ",".join({**RUN, "strategy": f"data={DIGITS}"}.values())]
    (tmp_path / "runs.csv").write_text("\n".join(rows))
    assert "column `strategy`" in ended(capsys, "validate", str(tmp_path / "runs.csv"))


NUMBERS = st.sampled_from([DIGITS, f"0x{DIGITS}", "1e999", "-1e999", "nan", "-0", "1e-400", "0.5", "-1", "0", "7"])
VALUES = st.one_of(
    NUMBERS,
    st.sampled_from(["true", "[]", "{}", "[[1]]", "[['a']]", "2026-11-15", "{a = 1}", "['*']", '["data"]']),
    st.text(min_size=1, max_size=5).map(json.dumps),
)


def fields_of(section: object) -> list[str]:
    """The fields of a table of the run file; none of a plain field."""
    return list(getattr(section, "model_fields", {}))


def error_of(read: Callable[[], object], *kinds: type[Exception]) -> str | None:
    """What the error says; None without one. Errors of other kinds are not for users."""
    try:
        read()
    except kinds as error:
        return str(error)
    return None


@settings(max_examples=100)
@given(
    key=st.sampled_from(
        [
            *("strategy", "shapes", "batchnorm", "checkpoint", "reduction", "sub_batches", "signature", "notes"),
            *("mesh", "mesh.data", "mesh.height", "pipeline", "pipeline.starts", "pipeline.microbatches"),
            *("pipeline.schedule", "layers", 'layers."*"', 'layers."*".sample', 'layers."*".algorithm'),
        ]
    ),
    value=VALUES,
)
def test_odd_values_in_a_plan(key: str, value: str) -> None:
    """What is read can be written, and read again."""
    rest = {"mesh.data": "2", 'layers."*"': "{}"}
    kept = "\n".join(f"{k} = {v}" for k, v in rest.items() if not key.startswith(k.split(".")[0]))
    text = f"{key} = {value}\n{kept}\n"
    said = error_of(lambda: loads(text, "odd.toml"), PlanError)
    if said is None:
        assert loads(dumps(loads(text))) == loads(text)
    else:
        assert said.startswith("odd.toml: ")
        assert len(said.splitlines()) == 1


@settings(max_examples=60)
@given(data=st.binary(max_size=40), at=st.integers(0, len(PLAN)))
def test_odd_bytes_in_a_plan(tmp_path: Path, data: bytes, at: int) -> None:
    path = tmp_path / "odd.toml"
    path.write_bytes(PLAN.encode()[:at] + data + PLAN.encode()[at:])
    assert "odd.toml" in (error_of(lambda: cm.load_plan(path), PlanError) or str(path))


@settings(max_examples=30)
@given(data=st.binary(max_size=40))
def test_odd_bytes_in_a_system(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "odd.toml"
    path.write_bytes(b'inherits = "abci"\n' + data)
    assert "odd" in (error_of(lambda: cm.System.load(path), SystemFileError) or str(path))


@settings(max_examples=40)
@given(
    key=st.sampled_from([key for key, _ in cm.System.load("abci").figures()]),
    value=NUMBERS | NUMBERS.map(lambda number: f'"{number} GB/s"'),
)
def test_odd_numbers_in_a_system(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(f'inherits = "abci"\n{key} = {value}\n')
    assert "odd" in (error_of(lambda: cm.System.load(path).render(), SystemFileError) or str(path))


RUN_KEYS = [
    *RunConfig.model_fields,
    *(f"{table}.{name}" for table, of in RunConfig.model_fields.items() for name in fields_of(of.annotation)),
    "extends", "model.args.filters", "data.augment.crop", "no.such.key",
]  # fmt: skip


@settings(max_examples=150)
@given(key=st.sampled_from(RUN_KEYS), value=VALUES, tail=st.binary(max_size=3))
def test_odd_values_in_a_run_file(tmp_path: Path, key: str, value: str, tail: bytes) -> None:
    """What is read can be written, and read again."""
    path, again = tmp_path / "odd.toml", tmp_path / "again.toml"
    path.write_bytes(f"{key} = {value}\n".encode("utf-8", "replace") + tail)
    said = error_of(lambda: load_config(path), ConfigError)
    if said is None:
        again.write_text(resolved_text(load_config(path)))
        assert resolved_text(load_config(again)) == again.read_text()
    else:
        assert "odd.toml" in said or "extends" in said


FIELDS = st.one_of(
    st.sampled_from(
        [DIGITS, f"data={DIGITS}", "1e999", "nan", "-1", "0", "1e300", "٣", "data=²", "data=2=2", ",", '"']
    ),
    st.text(max_size=6),
)


@settings(max_examples=60)
@given(column=st.sampled_from(NEEDED), value=FIELDS, tail=st.binary(max_size=4))
def test_odd_fields_in_runs(tmp_path: Path, column: str, value: str, tail: bytes) -> None:
    path, row = tmp_path / "runs.csv", {**RUN, column: value}
    text = "\n".join([",".join(row), ",".join(row.values())])
    path.write_bytes(text.encode("utf-8", "replace") + tail)
    said = error_of(lambda: read_runs(path, ["resnet50"], ["abci"]), RunsFileError)
    if said is None:
        assert all(0 < run.gpus <= 10**9 for run in read_runs(path, ["resnet50"], ["abci"]))
    else:
        assert "runs.csv" in said


@settings(max_examples=40)
@given(gpus=FIELDS, strategy=st.sampled_from(["data", "df", "filter", "x"]), seconds=FIELDS)
def test_odd_fields_in_a_figure(tmp_path: Path, gpus: str, strategy: str, seconds: str) -> None:
    path = tmp_path / "figure.csv"
    text = f"model,strategy,gpus,measured_total_s\nR50,{strategy},{gpus},{seconds}\n"
    path.write_bytes(text.encode("utf-8", "replace"))
    said = error_of(lambda: read_runs(path, ["resnet50"], ["abci"]), RunsFileError)
    assert "figure.csv" in (said or str(path))
