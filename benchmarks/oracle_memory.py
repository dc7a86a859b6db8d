"""Predicted and measured peaks of memory: real ranks, every preset, checkpointed blocks and sharded optimisers.

python -m benchmarks.oracle_memory [--device cuda] [--others] [--out FOLDER]

Prints a table; writes it and every point to the folder. `--others`: networks that the model was not tuned on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from convmesh import models
from convmesh.measure.measured_memory import Peak, Training, measure_training
from convmesh.testing import RankPool

RESNET = Training(model="resnet18", shape=(8, 3, 192, 192), strategy="data", axes={"data": 2}, sizes={"filters": 16})
UNET = Training(
    model="unet3d",
    shape=(2, 1, 48, 48, 48),
    strategy="data",
    axes={"data": 2},
    sizes={"filters": 4, "most_filters": 32, "levels": 5},
)
COSMOFLOW = Training(
    model="cosmoflow", shape=(4, 4, 64, 64, 64), strategy="data", axes={"data": 2}, sizes={"width": 0.25, "extent": 64}
)
ALEXNET = Training(model="alexnet", shape=(16, 3, 128, 128), strategy="data", axes={"data": 2}, sizes={"width": 0.5})
PRESETS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("data", {"data": 2}, {}),
    ("data", {"data": 2}, {"reduction": "sharded"}),
    ("spatial", {"height": 2}, {}),
    ("filter", {"filter": 2}, {}),
    ("channel", {"channel": 2}, {}),
    ("pipeline", {"pipe": 2}, {}),
    ("pipeline", {"pipe": 2}, {"schedule": "gpipe"}),
    ("pipeline", {"pipe": 2}, {"schedule": "interleaved"}),
    ("pipeline", {"pipe": 2}, {"schedule": "zero-bubble"}),
    ("hybrid", {"data": 2}, {}),
    ("data+spatial", {"data": 2, "height": 2}, {}),
    ("data+filter", {"data": 2, "filter": 2}, {}),
    ("data+channel", {"data": 2, "channel": 2}, {}),
    ("data+pipeline", {"data": 2, "pipe": 2}, {}),
]
RESNET50 = Training(model="resnet50", shape=(64, 3, 224, 224), strategy="data", axes={"data": 1})
LARGE = [
    RESNET50,
    Training(model="vgg16", shape=(32, 3, 224, 224), strategy="data", axes={"data": 1}),
    Training(model="unet3d", shape=(1, 1, 128, 128, 128), strategy="data", axes={"data": 1}),
    Training(model="cosmoflow", shape=(8, 4, 128, 128, 128), strategy="data", axes={"data": 1}),
    Training(model="unet3d", shape=(2, 1, 128, 128, 128), strategy="spatial", axes={"depth": 2}),
    Training(model="cosmoflow", shape=(8, 4, 128, 128, 128), strategy="filter", axes={"filter": 2}),
    Training(model="cosmoflow", shape=(8, 4, 128, 128, 128), strategy="hybrid", axes={"data": 2}),
    replace(RESNET50, axes={"data": 2}, options={"checkpoint": ["stage1", "stage2"], "reduction": "sharded"}),
]


def small(name: str, strategy: str, axes: dict[str, int], **options: Any) -> Training:
    """A small version of a reference network."""
    reference = models.find(name)
    shape = (reference.small_batch, *reference.small_sample)
    return Training(model=name, shape=shape, strategy=strategy, axes=axes, sizes=reference.small_sizes, options=options)


OTHERS = [
    small("densenet121", "spatial", {"height": 2}),
    small("mobilenet-v2", "filter", {"filter": 2}),
    small("convnext-tiny", "data", {"data": 2}),
    small("deepcam", "spatial", {"width": 2}),
    small("vnet", "data+channel", {"data": 2, "channel": 2}),
    *(
        small(name, "pipeline", {"pipe": pipe}, schedule=schedule)
        for name, pipe in (("vgg16", 2), ("vnet", 2), ("mobilenet-v2", 2), ("densenet121", 4), ("meshnet", 2))
        for schedule in ("1f1b", "gpipe", "interleaved", "zero-bubble")
    ),
    small("inception3", "pipeline", {"pipe": 2}, schedule="gpipe"),
    small("convnext-tiny", "pipeline", {"pipe": 4}, schedule="1f1b"),
    small("deepcam", "data+pipeline", {"data": 2, "pipe": 2}),
]


def trainings(device: str) -> list[Training]:
    """Published networks on a GPU, small ones on a CPU; every preset."""
    if device == "cuda":
        return [*LARGE, *(replace(RESNET50, strategy=s, axes=a, options=o) for s, a, o in PRESETS if s != "hybrid")]
    blocks = {"checkpoint": ["stage1", "stage2"]}
    networks = (RESNET, UNET, COSMOFLOW, ALEXNET)
    split = [replace(n, strategy=s, axes=a, options=o) for n in networks for s, a, o in PRESETS if _runs(n, s)]
    return [
        *split,
        replace(RESNET, options=blocks),
        replace(RESNET, strategy="spatial", axes={"height": 2}, options=blocks),
    ]


def _runs(network: Training, strategy: str) -> bool:
    """Whether the preset applies: hybrid cuts dense layers, which only some networks have."""
    return strategy != "hybrid" or network.model in ("alexnet", "cosmoflow")


def row(training: Training, peaks: list[Peak]) -> str:
    worst = max(peaks, key=lambda peak: abs(peak.error))
    mesh = ", ".join(f"{name}={extent}" for name, extent in training.axes.items())
    options = "; ".join(f"{name} {value}" for name, value in training.options.items())
    measured, predicted = worst.bytes_peak / 2**20, worst.predicted.bytes_peak / 2**20
    return (
        f"| {training.model} | {training.strategy} | {mesh} | {options} | {measured:.1f} | {predicted:.1f} "
        f"| {worst.error:+.1%} | {worst.predicted.phase} {worst.predicted.layer} | {worst.bytes_reserved / 2**20:.0f} |"
    )


HEAD = [
    "| network | strategy | mesh | options | measured MiB | predicted MiB | error | at | reserved MiB |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--others", action="store_true")
    options = parser.parse_args()
    lines, points = list(HEAD), []
    for training in OTHERS if options.others else trainings(options.device):
        with RankPool(training.mesh.size, seconds_timeout=240) as pool:
            peaks = pool.run(measure_training, training, options.device)
        lines.append(row(training, peaks))
        print(lines[-1], flush=True)
        points.append({"training": asdict(training), "ranks": [_plain(peak) for peak in peaks]})
        (options.out / "memory.json").write_text(json.dumps(points, indent=1))
    title = f"{datetime.date.today()}, {options.device}, torch {torch.__version__}: the rank with the largest error."
    (options.out / "memory.md").write_text("\n".join([title, "", *lines, ""]))


def _plain(peak: Peak) -> dict[str, Any]:
    predicted = {name: value for name, value in asdict(peak.predicted).items() if name != "curve"}
    return {"bytes_peak": peak.bytes_peak, "bytes_reserved": peak.bytes_reserved, "predicted": predicted}


if __name__ == "__main__":
    main()
