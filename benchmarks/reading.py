"""How fast a rank reads its part of a sample, compared with the page cache and with what else a user could call.

python -m benchmarks.reading            prints the tables of benchmarks/reading.md
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import machine
from convmesh.data import open_source
from convmesh.data.converting import convert
from convmesh.data.tensor_spec import Array
from convmesh.layout import Box, Partition, Span

SAMPLES, EXTENT, RANKS = 3, 256, 4
ROUNDS, ROUNDS_COMPRESSED = 60, 2
SHAPE = (1, EXTENT, EXTENT, EXTENT)
Read = Callable[[int], object]


def slab(rank: int) -> Box:
    """A rank's part of a sample that is cut along its depth."""
    return Box((Span(0, 1), Partition.even(EXTENT, RANKS).span(rank), Span(0, EXTENT), Span(0, EXTENT)))


def block(rank: int) -> Box:
    """A rank's part of a sample that is cut along depth and height."""
    halves = Partition.even(EXTENT, 2)
    return Box((Span(0, 1), halves.span(rank // 2), halves.span(rank % 2), Span(0, EXTENT)))


def write_files(folder: Path) -> None:
    """The same samples in every format: 255 different values, so that they compress as measured volumes do."""
    import h5py
    import zarr

    values = np.random.default_rng(0).integers(0, 255, (SAMPLES, *SHAPE)).astype(np.float32)
    np.save(folder / "a.npy", values)
    np.save(folder / "a.targets.npy", np.zeros(SAMPLES, np.float32))
    np.savez(folder / "a.npz", inputs=values, targets=np.zeros(SAMPLES, np.float32))
    for suffix in (".h5", ".zarr"):
        convert(folder / "a.npz", folder / f"a{suffix}")
    with h5py.File(folder / "gzip.h5", "w") as file:
        chunks = (1, 1, 32, EXTENT, EXTENT)
        file.create_dataset("inputs", data=values, chunks=chunks, compression="gzip", compression_opts=1, shuffle=True)
        file.create_dataset("targets", data=np.zeros(SAMPLES, np.float32))
    group = zarr.open_group(str(folder / "zstd.zarr"), mode="w")
    group.create_array("inputs", shape=values.shape, chunks=(1, 1, 32, EXTENT, EXTENT), dtype="f4")[...] = values
    group.create_array("targets", shape=(SAMPLES,), dtype="f4")[...] = 0
    (folder / "a.npz").unlink()


@lru_cache(maxsize=1)
def place_for(box: Box) -> Array:
    """One array for the bound and for us: how fast the kernel copies depends on where in a page an array begins."""
    return np.empty(box.shape, np.float32)


def page_cache(files: list[Path], box: Box) -> Read:
    """As many bytes of the same samples, in one run, into such an array, from the kernel's memory: the bound.

    Samples lie in one file at its end, or in a file each.
    """
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    out = place_for(box)
    view, sample = memoryview(out.reshape(-1).view(np.uint8).data), 4 * EXTENT**3
    first = max(0, files[0].stat().st_size - SAMPLES * sample)
    return lambda index: os.preadv(descriptors[index % len(files)], [view], first + index * sample * (len(files) == 1))


def ours(folder: Path, name: str, box: Box) -> Read:
    source, out = open_source(folder / name, check_finite=False), place_for(box)
    return lambda index: source.read(index, box, out)


def h5py_slices(folder: Path, name: str, box: Box) -> Read:
    import h5py

    dataset, out = h5py.File(folder / name)["inputs"], np.empty((1, *box.shape), np.float32)
    return lambda index: dataset.read_direct(out, (slice(index, index + 1), *box.slices()))


def zarr_slices(folder: Path, name: str, box: Box) -> Read:
    import zarr

    array: Any = zarr.open_group(str(folder / name), mode="r")["inputs"]
    return lambda index: array[(index, *box.slices())]


def tensorstore_slices(folder: Path, name: str, box: Box) -> Read:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / name / "inputs")}}
    array: Any = tensorstore.open(spec, open=True, read=True).result()
    return lambda index: array[(index, *box.slices())].read().result()


def memmap_slices(folder: Path, name: str, box: Box) -> Read:
    array = np.load(folder / name, mmap_mode="r")
    return lambda index: np.array(array[(index, *box.slices())])


def rivals(folder: Path, box: Box) -> dict[str, Read]:
    shards = [folder.joinpath("a.zarr", "inputs", "c", str(index), *"0000") for index in range(SAMPLES)]
    return {
        "page cache, .npy": page_cache([folder / "a.npy"], box),
        "ConvMesh, .npy": ours(folder, "a.npy", box),
        "np.load(mmap_mode), .npy": memmap_slices(folder, "a.npy", box),
        "page cache, HDF5": page_cache([folder / "a.h5"], box),
        "ConvMesh, HDF5": ours(folder, "a.h5", box),
        "h5py, HDF5": h5py_slices(folder, "a.h5", box),
        "page cache, Zarr shards": page_cache(shards, box),
        "ConvMesh, Zarr shards": ours(folder, "a.zarr", box),
        "tensorstore, Zarr shards": tensorstore_slices(folder, "a.zarr", box),
        "zarr-python, Zarr shards": zarr_slices(folder, "a.zarr", box),
    }


def compressed(folder: Path, box: Box) -> dict[str, Read]:
    return {
        "page cache, .npy": page_cache([folder / "a.npy"], box),
        "ConvMesh, HDF5 gzip": ours(folder, "gzip.h5", box),
        "h5py, HDF5 gzip": h5py_slices(folder, "gzip.h5", box),
        "ConvMesh, Zarr zstd": ours(folder, "zstd.zarr", box),
        "zarr-python, Zarr zstd": zarr_slices(folder, "zstd.zarr", box),
    }


def measured(reads: dict[str, Read], rounds: int) -> dict[str, float]:
    """The fewest seconds to read a part of a sample; rivals take turns, and other work only ever adds to a time."""
    seconds: dict[str, list[float]] = {name: [] for name in reads}
    for _ in range(rounds):
        for name, read in reads.items():
            for index in range(SAMPLES):
                begin = time.perf_counter()
                read(index)
                seconds[name].append(time.perf_counter() - begin)
    return {name: min(times) for name, times in seconds.items()}


def table(seconds: dict[str, float], count: int) -> str:
    rows = ["| reader | GB/s | of the page cache's |", "| --- | --- | --- |"]
    for name, best in seconds.items():
        file = name.partition(", ")[2]
        bound = seconds.get(f"page cache, {file}", seconds["page cache, .npy"])
        rows.append(f"| {name} | {count / best / 1e9:.2f} | {100 * bound / best:.0f} % |")
    return "\n".join(rows)


def shares(folder: Path) -> str:
    """Bytes that the rank with the most to read reads, over a quarter of the bytes."""
    rows = ["| file | depth cut over 4 | depth and height cut over 2×2 |", "| --- | --- | --- |"]
    for name in ("a.npy", "a.h5", "a.zarr", "gzip.h5", "zstd.zarr"):
        worst = [max(_amplification(folder / name, part(rank)) for rank in range(RANKS)) for part in (slab, block)]
        rows.append(f"| {name} | {worst[0]:.2f} | {worst[1]:.2f} |")
    return "\n".join(rows)


def _amplification(path: Path, box: Box) -> float:
    source = open_source(path, check_finite=False)
    source.read(0, box)
    return source.counters.amplification


def main() -> None:
    chosen = sys.argv[1] if len(sys.argv) > 1 else None
    print(f"{datetime.date.today()}, {machine()}; command: `python -m benchmarks.reading`\n")
    with tempfile.TemporaryDirectory(dir=chosen) as name:
        folder = Path(name)
        write_files(folder)
        for title, part in (("depth cut over 4", slab), ("depth and height cut over 2×2", block)):
            box = part(1)
            count = 4 * box.size
            print(f"### {title}\n\n{table(measured(rivals(folder, box), ROUNDS), count)}\n", flush=True)
        box = slab(1)
        slow = table(measured(compressed(folder, box), ROUNDS_COMPRESSED), 4 * box.size)
        print(f"### Compressed, depth cut over 4\n\n{slow}\n", flush=True)
        print(f"### Bytes read by one of 4 ranks, over a quarter of the bytes\n\n{shares(folder)}")


if __name__ == "__main__":
    main()
