"""Virtual machines that announce AMX and hide the sizes of its tiles, where oneDNN ends a process by SIGILL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convmesh.processor import ONEDNN_LIMIT, avoid_hidden_tiles, hides_tiles

FLAGS = "fpu avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8"


def described(path: Path, level: int, flags: str = FLAGS) -> Path:
    """Two cores; the second, which is not looked at, has no flags."""
    path.write_text(f"processor\t: 0\ncpuid level\t: {level}\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: \n")
    return path


@pytest.mark.parametrize(
    ("level", "flags", "limit"),
    [
        (0x1C, FLAGS, "AVX512_CORE_FP16"),
        (0x1C, "avx512f amx_tile", "AVX512_CORE"),
        (0x1D, FLAGS, None),
        (0x20, FLAGS, None),
        (0x10, "fpu avx2", None),
    ],
)
def test_onednn_is_kept_from_tiles_without_sizes(
    level: int, flags: str, limit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ONEDNN_LIMIT, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    avoid_hidden_tiles(described(tmp_path / "cpuinfo", level, flags))
    assert os.environ.get(ONEDNN_LIMIT) == limit


def test_the_users_own_limit_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONEDNN_LIMIT, "AVX2")
    avoid_hidden_tiles(described(tmp_path / "cpuinfo", 0x1C))
    assert os.environ[ONEDNN_LIMIT] == "AVX2"


def test_other_systems_have_no_such_file(tmp_path: Path) -> None:
    avoid_hidden_tiles(tmp_path / "missing")
    assert not hides_tiles({})


def test_products_in_bf16_end_well_in_a_new_process() -> None:
    code = "import convmesh, torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print((a @ a)[0, 0].item())"
    env = {name: value for name, value in os.environ.items() if name != ONEDNN_LIMIT}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "64.0"), done.stderr
