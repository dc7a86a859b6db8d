"""Layers of reference networks: one by name (`resnet50:stage3.0.body.1.conv`), or all with their sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from convmesh import models
from convmesh.errors import PlanError, UnknownNameError
from convmesh.models.reference import Reference
from convmesh.models.sizes import LayerSize, layer_sizes
from convmesh.oracle.explain import LayerSpec
from convmesh.oracle.explain.typed_layer import check_layer

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def layer_of(text: str, batch: int) -> LayerSpec:
    """A convolution or dense layer of a network, for `batch` of the network's own samples."""
    name, _, path = text.partition(":")
    reference = models.find(name)
    with torch.device("meta"):
        net = reference.create()
    layers = {key: module for key, module in net.named_modules() if isinstance(module, _KINDS)}
    if path not in layers:
        raise UnknownNameError.of(f"layer` of `{reference.name}", path, layers)
    input_shape = _input_of(net, layers[path], (batch, *reference.sample))
    layer = _spec(layers[path], input_shape, text)
    check_layer(layer, layer.kind, text)
    return layer


def _input_of(net: nn.Module, layer: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    shapes: list[tuple[int, ...]] = []
    hook = layer.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    try:
        with torch.no_grad():
            net(torch.empty(shape, device="meta"))
    finally:
        hook.remove()
    return shapes[0]


def _spec(layer: Any, given: tuple[int, ...], text: str) -> LayerSpec:
    weight = tuple(layer.weight.shape)
    if isinstance(layer, nn.Linear):
        return LayerSpec(weight=weight, given=given)
    if layer.groups > 1 or {*layer.dilation} != {1}:
        raise PlanError(
            f"`layer` (={text!r}) has {layer.groups} groups and dilation {layer.dilation}, which cannot be explained: "
            "name a layer with 1 group and dilation 1."
        )
    padding = tuple((k - 1) // 2 for k in layer.kernel_size) if layer.padding == "same" else layer.padding
    padding = (0,) * len(layer.kernel_size) if padding == "valid" else padding
    return LayerSpec(weight=weight, given=given, stride=layer.stride, padding=padding)


@dataclass(frozen=True)
class LayerSizes:
    """Activations and weights of each stage, which decide between sharing samples and sharing weights."""

    model: str
    stages: tuple[LayerSize, ...]

    @property
    def data(self) -> int:
        """Number of values that all stages output for one sample."""
        return sum(stage.data for stage in self.stages)

    @property
    def parameters(self) -> int:
        return sum(stage.parameters for stage in self.stages)

    def to_plain(self) -> dict[str, Any]:
        """Ready for JSON."""
        stages = [{**asdict(stage), "data": stage.data} for stage in self.stages]
        return {"model": self.model, "stages": stages, "data": self.data, "parameters": self.parameters}


def sizes_of(reference: Reference) -> LayerSizes:
    """Layer sizes of the network as published, for one sample."""
    with torch.device("meta"):
        net = reference.create()
    return LayerSizes(reference.name, tuple(layer_sizes(net, reference.sample)))


def show_sizes(sizes: LayerSizes) -> str:
    """The table as text, followed by advice."""
    rows = [("stage", "output", "data", "weights", "weights/data")]
    for stage in sizes.stages:
        output = "×".join(map(str, stage.output))
        rows.append((stage.name, output, f"{stage.data}", f"{stage.parameters}", _ratio(stage.parameters, stage.data)))
    rows.append(("total", "", f"{sizes.data}", f"{sizes.parameters}", _ratio(sizes.parameters, sizes.data)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(
        [f"{sizes.model}: values that each stage outputs for one sample, and its weights", *lines, *_advice(sizes)]
    )


def _ratio(parameters: int, data: int) -> str:
    return f"{parameters / data:.2f}"


def _advice(sizes: LayerSizes) -> list[str]:
    """Per step, sharing samples moves the weights; sharing weights moves the data of every sample in the batch."""
    crossover = sizes.parameters / sizes.data
    heavy = [stage.name for stage in sizes.stages if stage.parameters > stage.data]
    return [
        f"sharing samples moves {sizes.parameters} gradients per step; sharing weights moves the data of every sample, "
        f"which is less for batches of up to {int(crossover)} samples",
        f"stages with more weights than data: {', '.join(heavy) or 'none'}",
    ]
