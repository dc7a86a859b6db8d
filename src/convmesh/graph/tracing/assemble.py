"""A traced graph as a module that holds the model's own modules and parameters, under their own names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from convmesh.private_torch.graph_sources import forget_source_of


def assemble(model: nn.Module, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """The graph's forward in a module whose state is that of `model`; tensors made while tracing come with it."""
    for node in graph.nodes:
        node.type = None  # annotations of the user's code need not resolve here
    module = fx.GraphModule(nn.Module(), fx.Graph(), type(model).__name__)
    forget_source_of(module)
    module.__dict__.update(_tensors(model))
    module.training = model.training
    for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        getattr(module, kind).update(getattr(model, kind))
    for name, tensor in constants.items():
        module.register_buffer(name, tensor, persistent=False)
    module.graph = graph
    forget_source_of(module)
    return module


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that the model holds as plain attributes."""
    return {name: value for name, value in model.__dict__.items() if isinstance(value, torch.Tensor)}
