"""Kernels of a step that only copy: between memory formats, between types, or as they are.

python -m benchmarks.gpu_step.copies [CASE ...] [--out FILE.json]      unet3d and nnunet, eager and compiled

A kernel of Inductor's is a copy if its source loads one value, stores it, and computes nothing; of the format if it
stores elsewhere than it loads, unless what it reads is a part of a tensor. Of other kernels the name tells.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Literal

Kind = Literal["format", "part", "same", ""]
"""Copies that change the memory format; of a part of a tensor, without gaps; others, and casts; other kernels."""

STEPS_BEFORE = 6
CHANGES_FORMAT = re.compile(r"nchwToNhwc|nhwcToNchw|transpose|ncdhw|ndhwc|permute|tensorTransform", re.IGNORECASE)
STRIDED = re.compile(r"(?<!_)elementwise_kernel<")
"""How torch's kernel begins that goes through tensors of different strides; contiguous ones have others."""
COPIES = re.compile(r"copy|memcpy|clone", re.IGNORECASE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["unet3d", "nnunet"])
    parser.add_argument("--out", type=Path, default=Path("gpu_copies.json"))
    options = parser.parse_args()
    pairs = [(case, kind) for case in options.cases or ["unet3d", "nnunet"] for kind in ("compiled", "eager")]
    found: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(len(pairs), maxtasksperchild=1) as pool:
        for name, rows in pool.imap_unordered(_counted, pairs, chunksize=1):
            found[name] = rows
            options.out.write_text(json.dumps(found, indent=1))
            print(name, summary(rows), flush=True)


def summary(rows: list[list[Any]]) -> dict[str, Any]:
    """Kernels and microseconds by kind."""
    kinds: dict[str, list[float]] = {kind: [0, 0.0] for kind in ("format", "part", "same", "")}
    for _, kind, count, us in rows:
        kinds[kind][0] += count
        kinds[kind][1] = round(kinds[kind][1] + us)
    return kinds


def _counted(pair: tuple[str, str]) -> tuple[str, list[list[Any]]]:
    """Every kernel of one step: its name, its kind, how often it runs and for how many microseconds."""
    case, kind = pair
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            return " ".join(pair), _rows(case, kind == "compiled", Path(cache))
    except Exception as error:
        return f"{' '.join(pair)} failed: {type(error).__name__}: {error}"[:500], []


def _rows(name: str, compiling: bool, cache: Path) -> list[list[Any]]:
    import torch

    import convmesh as cm
    from benchmarks.gpu_step.cases import CASES
    from benchmarks.gpu_step.kernels import times_of
    from benchmarks.gpu_step.trainings import our_training

    cm.init()
    torch.backends.cudnn.benchmark = True
    step = our_training(CASES[name], True, compiling).step
    for _ in range(STEPS_BEFORE):
        step()
    known = kernels_made(cache)
    spent = sorted(times_of(step).items(), key=lambda pair: -sum(pair[1]))
    return [[kernel[:160], kind_of(kernel, known), len(times), round(sum(times), 1)] for kernel, times in spent]


def kind_of(kernel: str, made: dict[str, Kind]) -> Kind:
    """What a kernel of this name does, with what is known of those that Inductor made."""
    if kernel.startswith("triton_"):
        found = made.get(kernel, "")
        return "part" if found == "format" and "_slice" in kernel else found
    if CHANGES_FORMAT.search(kernel):
        return "format"
    return ("format" if STRIDED.search(kernel) else "same") if COPIES.search(kernel) else ""


def kernels_made(cache: Path) -> dict[str, Kind]:
    """The kernels in Inductor's folder that only copy, by name; where two have one name, the one that copies more."""
    found: dict[str, Kind] = {}
    for file in cache.rglob("*.py"):
        for name, body in re.findall(r"\ndef (triton_\w+)\([^\n]*\):\n(.*?)(?=\n\S|\Z)", file.read_text(), re.DOTALL):
            kind = kind_of_source(body)
            found[name] = max(found.get(name, ""), kind, key=["", "same", "format"].index)
    return found


def kind_of_source(body: str) -> Kind:
    """Whether a kernel only copies, by its source."""
    loads = re.findall(r"tl\.load\(\s*\w+\s*\+\s*\((.*?)\),", body)
    stores = re.findall(r"tl\.store\(\s*\w+\s*\+\s*\((.*?)\),", body)
    lines = [line.strip() for line in body.splitlines() if re.match(r"\s*tmp\d+ =", line)]
    computes = [
        line for line in lines if "tl.load" not in line and not re.fullmatch(r"tmp\d+ = tmp\d+(\.to\(.*\))?", line)
    ]
    if len(loads) != 1 or len(stores) != 1 or computes:
        return ""
    return "same" if loads[0].strip() == stores[0].strip() else "format"


if __name__ == "__main__":
    main()
