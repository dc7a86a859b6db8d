"""The networks of the survey."""

from __future__ import annotations

from benchmarks.networks.factories import Published
from benchmarks.networks.medical import medical
from benchmarks.networks.segmentation_decoders import segmentation_models
from benchmarks.networks.timm_families import timm_networks
from benchmarks.networks.torchvision_builders import torchvision_networks


def published() -> dict[str, Published]:
    """All networks, by name."""
    each = [*torchvision_networks(), *timm_networks(), *segmentation_models(), *medical()]
    return {network.name: network for network in each}
