"""What a strategy does to one layer, for people who learn: pictures, formulas, numbers."""

from convmesh.oracle.explain.layer import LayerSpec, parse_layer
from convmesh.oracle.explain.page import Explanation
from convmesh.oracle.explain.sharing import Sharing, sharing
from convmesh.oracle.explain.volumes import Volume, volumes

__all__ = ["Explanation", "LayerSpec", "Sharing", "Volume", "parse_layer", "sharing", "volumes"]
