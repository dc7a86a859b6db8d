"""What a strategy does to one layer, for learning: pictures, formulas, numbers."""

from convmesh.oracle.explain.explanation import Explanation
from convmesh.oracle.explain.strategy_terms import LayerShares, sharing
from convmesh.oracle.explain.typed_layer import LayerSpec, parse_layer
from convmesh.oracle.explain.volumes import Volume, volumes

__all__ = ["Explanation", "LayerShares", "LayerSpec", "Volume", "parse_layer", "sharing", "volumes"]
