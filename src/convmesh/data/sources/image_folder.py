"""Images in folders: the name of a folder is the class of the images in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from convmesh.data.libraries import library
from convmesh.data.sources.source import ReadCounters, Source
from convmesh.data.tensor_spec import Array, TensorSpec
from convmesh.errors import DataError
from convmesh.layout import Box

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")


class ImageFolder(Source):
    """Images of one size, as (channels, height, width) bytes; classes are numbered in the order of their names."""

    def __init__(self, path: Path, size: tuple[int, int] | None = None, check_finite: bool = True) -> None:
        self._path, self._size = path, size
        self.classes = tuple(folder.name for folder in sorted(path.iterdir()) if _images(folder))
        self._files = [(file, label) for label, name in enumerate(self.classes) for file in _images(path / name)]
        if not self._files:
            raise DataError(
                f"{path} has no images; put those of each class in a folder of its own, named as the class."
            )
        self.counters, self.check_finite = ReadCounters(), check_finite
        self.input = TensorSpec(self._pixels(0).shape, np.dtype(np.uint8))
        self.target = TensorSpec((), np.dtype(np.int64))

    def __len__(self) -> int:
        return len(self._files)

    def __str__(self) -> str:
        return str(self._path)

    def _pixels(self, index: int) -> Array:
        pillow: Any = library("PIL.Image", "reading images")
        file = self._files[index][0]
        try:
            with pillow.open(file) as image:
                chosen = image if image.mode in ("L", "RGB") else image.convert("RGB")
                sized = chosen if self._size is None else chosen.resize(self._size[::-1])
                pixels = np.asarray(sized)
        except OSError as error:
            raise DataError(f"{file} cannot be read as an image: {error}.") from error
        return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)

    def _input_into(self, index: int, box: Box, out: Array) -> int:
        pixels = self._pixels(index)
        if pixels.shape != self.input.shape:
            raise DataError(
                f"images must all have one size, but {self._files[index][0]} is {pixels.shape} and the first is "
                f"{self.input.shape}; open the folder with `size=(height, width)` to resize them."
            )
        out[...] = pixels[box.slices()]
        return self.input.bytes_sample

    def _target_into(self, index: int, box: Box, out: Array) -> int:
        del box  # a class has no dims
        out[...] = self._files[index][1]
        return 0


def _images(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in IMAGES) if folder.is_dir() else []
