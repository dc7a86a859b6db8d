"""Samples for split networks: sources that each rank reads in part, their order, augmentation and loading.

Names load when they are first used, so that `convmesh data info` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convmesh.data.augment import Augment, SampleTransform
    from convmesh.data.generators.catalogue_of_generators import generator
    from convmesh.data.generators.sample_generator import GeneratedSource, SampleGenerator
    from convmesh.data.loader import Loader
    from convmesh.data.opening import open_source
    from convmesh.data.sample_order import Order
    from convmesh.data.sample_store import SampleStore
    from convmesh.data.sources.array_source import ArraySource
    from convmesh.data.sources.image_folder import ImageFolder
    from convmesh.data.sources.source import ReadCounters, Source
    from convmesh.data.sources.torch_source import TorchSource
    from convmesh.data.tensor_spec import TensorSpec

_PLACES = {
    "ArraySource": "sources.array_source",
    "Augment": "augment",
    "GeneratedSource": "generators.sample_generator",
    "ImageFolder": "sources.image_folder",
    "Loader": "loader",
    "Order": "sample_order",
    "ReadCounters": "sources.source",
    "SampleGenerator": "generators.sample_generator",
    "SampleStore": "sample_store",
    "SampleTransform": "augment",
    "Source": "sources.source",
    "TensorSpec": "tensor_spec",
    "TorchSource": "sources.torch_source",
    "generator": "generators.catalogue_of_generators",
    "open_source": "opening",
}

__all__ = [
    "ArraySource",
    "Augment",
    "GeneratedSource",
    "ImageFolder",
    "Loader",
    "Order",
    "ReadCounters",
    "SampleGenerator",
    "SampleStore",
    "SampleTransform",
    "Source",
    "TensorSpec",
    "TorchSource",
    "generator",
    "open_source",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'convmesh.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"convmesh.data.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
