"""The page of steps on one GPU, from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.pages import put_section

PAGE = Path(__file__).parents[1] / "gpu_step.md"
HEAD = """# Training steps on one GPU

Whole steps (forward, loss, backward, SGD with momentum) in bf16 autocast with cuDNN's benchmark on; the row `nnunet`
has no update. Each rival runs in a process of its own. All of them compile first, at the same time. Then the rivals of
a case are timed in alternation, with nothing else on the GPU; the table has medians and quartiles of these blocks.
Torch's best is the fastest measured torch row of the case. `GPU busy` is the sum of a profiled step's kernels. Peak
memory is torch's count of allocated bytes in one step; torch's own CUDA graphs hide theirs from it.
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
        best = _best(rivals)
        lines += [_row(case, name, rival, best) for name, rival in rivals.items()]
    return "\n".join(lines)


def _best(rivals: dict[str, Any]) -> float | None:
    """The fastest torch step of a case, in seconds."""
    return min(
        (r["seconds"] for name, r in rivals.items() if name.startswith("torch") and "seconds" in r), default=None
    )


def _row(case: str, name: str, rival: dict[str, Any], best: float | None) -> str:
    if "seconds" not in rival:
        reason = rival.get("failed", "prepared, not timed").splitlines()[0].replace("|", "/")
        return f"| {case} | {name} | {reason} | | | | | |"
    low, high = (1e3 * q for q in rival["quartiles"])
    ratio = f"{rival['seconds'] / best:.2f} ×" if best else ""
    return (
        f"| {case} | {name} | {1e3 * rival['seconds']:.2f} | {low:.2f} to {high:.2f} "
        f"| {_busy(rival)} | {_peak(rival)} | {ratio} |"
    )


def _busy(rival: dict[str, Any]) -> str:
    return f"{1e3 * rival['seconds_busy']:.2f} | {rival['kernels']}" if "kernels" in rival else " | "


def _peak(rival: dict[str, Any]) -> str:
    return f"{rival['bytes_peak'] / 2**30:.2f}" if rival["bytes_peak"] is not None else ""
