"""`convmesh explain STRATEGY`: what a strategy does to a layer; `convmesh explain MODEL`: how big its layers are."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from convmesh.cli.exits import BadInputError, Exit
from convmesh.errors import UnknownNameError
from convmesh.layout.mesh import Mesh
from convmesh.plans.default_mesh import mesh_for
from convmesh.plans.presets import STRATEGIES

if TYPE_CHECKING:
    from convmesh.oracle.explain import LayerSpec
    from convmesh.system import System


@dataclass(frozen=True)
class ExplainOptions:
    """Options of `convmesh explain`."""

    strategy: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STRATEGY")]
    """data, spatial, filter, channel, pipeline, hybrid, data+spatial, data+filter, data+channel or data+pipeline;
    or a reference network, to list the activations and weights of its layers, which decide between strategies."""
    layer: str | None = None
    """The layer: resnet50:stage3.0.body.1.conv, "linear 4096x25088 on 32x25088" or "conv 256x256x3x3 on 8x256x56x56":
    filters x channels x kernel on samples x channels x space, optionally followed by stride 2 or padding 0; or
    "attention 8 on 2x4096x512": heads on samples x tokens x features."""
    ranks: int = 4
    """Number of ranks that share the layer."""
    algorithm: Literal["auto", "x", "y", "w"] = "auto"
    """For cut channels: which tensor stays in place. By default y for filter, x for channel."""
    batch: int = 32
    """Global batch size, for a reference network's layer."""
    system: str | None = None
    """Cluster to predict the time on: a name such as dgx-a100 or local, or a system file."""
    json: bool = False
    """Print the explanation as JSON."""


def run(options: ExplainOptions) -> int:
    """Explain and print."""
    if options.ranks < 1 or options.batch < 1:
        name, value = ("--ranks", options.ranks) if options.ranks < 1 else ("--batch", options.batch)
        raise BadInputError(f"`{name}` (={value}) must be a positive number.")
    if options.strategy not in STRATEGIES:
        return _explain_model(options)
    from convmesh.planner.explaining import explain
    from convmesh.system import System

    system = System.load(options.system) if options.system else None
    if (options.layer or "").startswith("attention"):
        return _explain_attention(options, system)
    layer = _layer(options)
    explanation = explain(options.strategy, layer, _mesh(options, layer), options.algorithm, system)
    _write(json.dumps(explanation.to_plain(), indent=2) if options.json else str(explanation))
    return Exit.DONE


def _explain_attention(options: ExplainOptions, system: System | None) -> int:
    from convmesh.planner.explaining_attention import explain_attention, parse_attention

    explanation = explain_attention(options.strategy, parse_attention(options.layer or ""), options.ranks, system)
    _write(json.dumps(explanation.to_plain(), indent=2) if options.json else str(explanation))
    return Exit.DONE


def _layer(options: ExplainOptions) -> LayerSpec:
    from convmesh.oracle.explain.typed_layer import DENSE_EXAMPLE, EXAMPLE, parse_layer

    text = options.layer or (DENSE_EXAMPLE if options.strategy == "hybrid" else EXAMPLE)
    if ":" not in text:
        return parse_layer(text)
    from convmesh.cli.model_layers import layer_of

    return layer_of(text, options.batch)


def _mesh(options: ExplainOptions, layer: LayerSpec) -> Mesh:
    if options.algorithm != "w":
        return mesh_for(options.strategy, options.ranks, len(layer.space))
    if not {"filter", "channel"} & {*options.strategy.split("+")}:
        raise BadInputError(f"`--algorithm` (='w') is for filter and channel, not for {options.strategy}.")
    sides = mesh_for("data+filter", options.ranks, 2).axes.values()
    if options.strategy.startswith("data") or len(sides) < 2:
        raise BadInputError(
            f"`--algorithm` (='w') needs a grid of ranks, which {options.strategy} on `--ranks` (={options.ranks}) "
            "does not have: use channel or filter on 4, 6, 8, 9, ... ranks."
        )
    channel, filters = sides
    return Mesh(channel=channel, filter=filters)


def _explain_model(options: ExplainOptions) -> int:
    """Print the table of a network's stages."""
    from convmesh import models

    try:
        reference = models.find(options.strategy)
    except UnknownNameError:
        raise UnknownNameError.of("strategy", options.strategy, [*STRATEGIES, *models.names()]) from None
    from convmesh.cli.model_layers import show_sizes, sizes_of

    sizes = sizes_of(reference)
    _write(json.dumps(sizes.to_plain(), indent=2) if options.json else show_sizes(sizes))
    return Exit.DONE


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
