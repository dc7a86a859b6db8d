"""The page of steps on one GPU, from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.pages import put_section

PAGE = Path(__file__).parents[1] / "gpu_step.md"
HEAD = """# Training steps on one GPU

Whole steps (forward, loss, backward, SGD with momentum) in bf16 autocast with cuDNN's benchmark on; the row `nnunet`
has no update. Each rival has a process of its own. All of them compile first, at the same time; then the rivals of a
row are timed in alternation, with nothing else on the GPU, and the table has medians of these blocks. Torch's best is
the fastest of the measured torch rows. Memory is the peak of a step. `ConvMesh graph` is the eager step captured as a
CUDA graph by hand; its dropout masks are those of the captured step.
"""


def write_page(found: dict[str, Any], page: Path = PAGE) -> None:
    """Write the page, or its section of steps anew."""
    if not page.exists():
        page.write_text(HEAD)
    about = found["about"]
    machine = f"{about['date']}, {about['device']}, torch {about['torch']}, cuDNN {about['cudnn']}"
    put_section("steps", f"{machine}; command: `{about['command']}`\n\n{_table(found['cases'])}", page)


def _table(cases: dict[str, Any]) -> str:
    lines = [
        "| work | rival | median ms | quartiles | GPU busy ms | kernels | peak GiB | of torch's best |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, rivals in cases.items():
        measured = {name: rival for name, rival in rivals.items() if "seconds" in rival}
        best = min((r["seconds"] for name, r in measured.items() if name.startswith("torch")), default=None)
        lines += [_row(case, name, rival, best) for name, rival in measured.items()]
        lines += [
            _failure(case, name, r["failed"]) for name, r in rivals.items() if name not in measured and "failed" in r
        ]
    return "\n".join(lines)


def _row(case: str, name: str, rival: dict[str, Any], best: float | None) -> str:
    low, high = (1e3 * q for q in rival["quartiles"])
    ratio = f"{rival['seconds'] / best:.2f} ×" if best else ""
    return (
        f"| {case} | {name} | {1e3 * rival['seconds']:.2f} | {low:.2f} to {high:.2f} "
        f"| {_busy(rival)} | {rival['bytes_peak'] / 2**30:.2f} | {ratio} |"
    )


def _busy(rival: dict[str, Any]) -> str:
    return f"{1e3 * rival['seconds_busy']:.2f} | {rival['kernels']}" if "kernels" in rival else " | "


def _failure(case: str, name: str, failed: str) -> str:
    reason = failed.splitlines()[0].replace("|", "/")
    return f"| {case} | {name} | {reason} | | | | | |"
