"""What a plan costs the storage: bytes of a sample that ranks read, against the bytes they need."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from convmesh.data.feeding import Feed, sample_box
from convmesh.data.sources.array_source import ArraySource, Samples
from convmesh.data.sources.source import Source
from convmesh.errors import DataWarning
from convmesh.layout import Box

MOST_AMPLIFICATION = 1.5
"""Above this many bytes read for each byte needed, a conversion is advised."""
MOST_RANKS = 512
"""Of larger meshes only the first ranks are counted."""


@dataclass(frozen=True)
class SampleCost:
    """One sample, read once by all ranks that train on it."""

    array: str
    storage: str
    bytes_needed: int
    bytes_read: int

    @property
    def amplification(self) -> float:
        """Bytes read for each byte needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


def warn_of_cost(source: Source, feeds: Iterable[Feed], ranks: int) -> None:
    """Warn, with the cost, if a file's chunks make the ranks of this plan read much more than they need."""
    if not isinstance(source, ArraySource):
        return
    for feed, samples in zip(feeds, (source.inputs, source.targets), strict=True):
        cost = sample_cost(feed, samples, ranks)
        if cost.storage == "gzip":
            _warn(
                f"{cost.array} is gzipped, so every rank unpacks whole volumes, every time; convert them once: "
                f"`convmesh data convert {source} NEW.h5`."
            )
        elif cost.amplification > MOST_AMPLIFICATION:
            _warn(
                f"{cost.array} lies in {cost.storage}: as this plan cuts it, ranks read {cost.amplification:.1f} times "
                f"the bytes they need, {cost.bytes_read / 1e6:.3g} instead of {cost.bytes_needed / 1e6:.3g} MB a "
                f"sample. `convmesh data convert {source} NEW.h5` writes it so that each reads its part only."
            )


def _warn(text: str) -> None:
    warnings.warn(text, DataWarning, stacklevel=4)


def sample_cost(feed: Feed, samples: Samples, ranks: int) -> SampleCost:
    """What the ranks read of the first sample; ranks that hold the same part of other samples count once."""
    parts = dict.fromkeys(_part(feed, rank) for rank in range(min(ranks, MOST_RANKS)))
    needed = read = 0
    for box in parts:
        if box.size:
            array, there = samples.at(0, box)
            needed += box.size * samples.spec.dtype.itemsize
            read += array.bytes_to_read(there)
    first = samples.arrays()[0]
    return SampleCost(first.name, first.storage, needed, read)


def _part(feed: Feed, rank: int) -> Box:
    """The part of a stored sample that a rank reads."""
    layout = feed.layout_of(1)
    _, box = sample_box(layout.box(rank))
    transform = feed.transform(0, 0)
    return box if transform is None or not box.size else transform.source_box(box)
