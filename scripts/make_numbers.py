"""Writes the README's table of numbers from the benchmark pages.

python -m scripts.make_numbers
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- numbers: made by `make docs` -->\n", "<!-- end of numbers -->"


@dataclass(frozen=True)
class Race:
    """One row: a section of a benchmark page, and two of its rivals."""

    task: str
    page: str
    section: str
    ours: str
    other: str
    other_label: str = ""

    def row(self) -> str:
        ours, other = (self.milliseconds(rival) for rival in (self.ours, self.other))
        link = f"[{self.page}](benchmarks/{self.page})"
        cells = (self.task, self.other_label or self.other, f"{other:.0f} ms", f"{ours:.0f} ms", f"{other / ours:.2f}×")
        return f"| {' | '.join(cells)} | {link} |"

    def milliseconds(self, rival: str) -> float:
        """The median that the page has for a rival."""
        _, _, section = (ROOT / "benchmarks" / self.page).read_text(encoding="utf-8").partition(f"### {self.section}\n")
        found = re.search(rf"^\| {re.escape(rival)} \| ([\d.]+) \|", section, re.MULTILINE)
        assert found is not None, f"{self.page}, {self.section}: no row {rival!r}"
        return float(found[1])


SPLIT, SPLIT_LAST = "ConvMesh, 2 ranks × 1 thread", "ConvMesh, 2 ranks × 1 thread, channels-last"
THREADS = "1 process × 2 threads, channels-last"
"""The fastest way to use both cores without ConvMesh."""

RACES = (
    Race("3D U-Net, 64³, depth cut", "unet.md", "No norm", SPLIT, THREADS),
    Race("3D U-Net with group norm, 64³", "unet.md", "Group norm", SPLIT, THREADS),
    Race("Conv3d 32→32, 64³, depth cut", "conv.md", "Conv3d 32→32 k3 on 64³, depth cut", SPLIT_LAST, THREADS),
    Race("Conv2d 64→64, 512², height cut", "conv.md", "Conv2d 64→64 k3 on 512², height cut", SPLIT_LAST, THREADS),
    Race(
        "Conv2d 256→256, channels cut",
        "channels.md",
        "Conv2d 256→256 k3 on 56×56, batch 8, forward and backward",
        "ConvMesh, stationary-y",
        "plain: all-reduce y, all-gather dx",
        "channel parallelism by hand, 2 ranks",
    ),
    Race("ResNet-18, samples cut", "ddp.md", "resnet18, 16 × 64×64", "ConvMesh, data", "DDP", "DDP, 2 ranks"),
)


def table() -> str:
    """The table as Markdown."""
    head = ["| forward and backward on 2 cores | compared with | its time | ConvMesh | faster | page |"]
    return "\n".join([*head, "| --- | --- | --- | --- | --- | --- |", *(race.row() for race in RACES), ""])


def in_readme() -> str:
    """The table that the README shows."""
    return README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write() -> None:
    """Put the table into the README."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    README.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write()
