"""A traced graph as a module that holds the model's own modules and parameters, under their own names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from convmesh.private_torch.graph_sources import forget_source_of
from convmesh.private_torch.module_tables import copy_state


def assemble(model: nn.Module, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """The graph's forward in a module with the state of `model`; the trace's constants become its buffers."""
    for node in graph.nodes:
        node.type = None  # annotations of the user's code need not resolve here
    module = fx.GraphModule(nn.Module(), fx.Graph(), type(model).__name__)
    forget_source_of(module)
    module.__dict__.update(_tensors(model))
    module.training = model.training
    copy_state(module, model)
    for name, tensor in constants.items():
        module.register_buffer(name, tensor, persistent=False)
    module.graph = graph
    forget_source_of(module)
    return module


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are plain attributes of the model."""
    return {name: value for name, value in model.__dict__.items() if isinstance(value, torch.Tensor)}
