"""ParaDL's published figure as measured runs: batches and roles, which the figure lacks, are added here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from convmesh.validation.measured_run import whole_number

FOLDER = Path(__file__).parent / "data"
SHIPPED = {name: FOLDER / f"{name}.csv" for name in ("public_runs", "paradl_figure", "published_anchors")}
"""Measured runs that ship with ConvMesh; the last are single-device figures for series without an anchor."""

COLUMNS = ("model", "strategy", "gpus", "measured_total_s")
SOURCE = "ParaDL, HPDC'21, figure of measured steps"

MODELS = {"R50": "resnet50", "VGG": "vgg16"}
PARTS = {
    "data": ("data", None), "filter": (None, "filter"), "channel": (None, "channel"),
    "df": ("data", "filter"), "ds": ("data", "spatial"),
}  # fmt: skip
"""By name in the figure: the part that grows with the GPUs, and the part inside (a node's four GPUs, if both)."""

GROUP = 4
BATCHES = {"resnet50": 64, "vgg16": 32}
"""Samples of each data-parallel rank or group, which the figure does not give: they follow from its column of computing
times for data parallelism. For VGG16 by filters the authors' job scripts have 64 instead."""


def is_figure(header: Sequence[str]) -> bool:
    """Whether a file has the figure's columns rather than a run's."""
    return {*COLUMNS} <= {*header} and "step_ms" not in header


def rows_of_figure(rows: Iterable[tuple[int, Mapping[str, str]]]) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows in the format of a runs file; the run on the fewest GPUs of each network and strategy is the anchor."""
    listed = [(line, {key.strip(): value.strip() for key, value in row.items() if key}) for line, row in rows]
    fewest: dict[tuple[str, str], int] = {}
    for _, row in listed:
        if (gpus := whole_number(row["gpus"])) is not None:
            key = row["model"], row["strategy"]
            fewest[key] = min(fewest.get(key, gpus), gpus)
    for line, row in listed:
        gpus = whole_number(row["gpus"])
        first = gpus is not None and gpus == fewest[row["model"], row["strategy"]]
        yield line, _row(row, "anchor" if first else "test")


def _row(row: Mapping[str, str], role: str) -> dict[str, str]:
    model = MODELS.get(row["model"], row["model"])
    groups, strategy = _strategy(row["strategy"], row["gpus"])
    return {
        "id": f"figure-{row['model']}-{row['strategy']}-{row['gpus']}",
        "role": role,
        "system": "abci",
        "gpus": row["gpus"],
        "gpus_per_node": "4",
        "model": model,
        "precision": "fp32",
        "strategy": strategy,
        "global_batch": str(BATCHES.get(model, 32) * groups),
        "step_ms": _milliseconds(row["measured_total_s"]),
        "compute_ms": _milliseconds(row.get("measured_comp_s", "")),
        "source": f"{SOURCE} ({row['strategy']})",
    }


def _strategy(name: str, gpus: str) -> tuple[int, str]:
    """The groups that share the global batch, and the strategy in a run's notation."""
    ranks = whole_number(gpus)
    if name not in PARTS or ranks is None:
        return 1, name
    outer, inner = PARTS[name]
    if inner is None:
        return ranks, f"data={ranks}"
    if outer is None:
        return 1, f"{inner}={ranks}"
    return ranks // GROUP, f"data={ranks // GROUP},{inner}={GROUP}"


def _milliseconds(seconds: str) -> str:
    try:
        return f"{float(seconds) * 1000:g}"
    except ValueError:
        return seconds
