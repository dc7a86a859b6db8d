"""Modules without their weights: what a plan keeps of a network, so that it pins no memory of the user's model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import fx, nn

from convmesh.private_torch.graph_sources import forget_source_of
from convmesh.private_torch.module_tables import buffers_of, children_of, parameters_of

Own = Mapping[str, "weakref.ref[Any]"]
"""By path: the modules, parameters and buffers of a model that a graph calls or reads, not kept alive."""

Some = TypeVar("Some", bound=nn.Module)


def parts_of(module: fx.GraphModule) -> dict[str, Any]:
    """Everything that a traced module calls or reads, by path."""
    return {
        str(node.target): _at(module, str(node.target))
        for node in module.graph.nodes
        if node.op in ("call_module", "get_attr")
    }


def own_parts(module: fx.GraphModule, constants: Mapping[str, torch.Tensor]) -> Own:
    """Weak references to what a traced module uses of its model, except the constants of the trace."""
    parts = {path: part for path, part in parts_of(module).items() if path not in constants}
    return {path: weakref.ref(part) for path, part in parts.items() if isinstance(part, (nn.Module, torch.Tensor))}


def is_from(own: Own, model: nn.Module) -> bool:
    """Whether `model` still has every one of those parts under the same path."""
    try:
        return all(_at(model, path) is part() for path, part in own.items())
    except AttributeError:
        return False


def weightless_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a traced module whose parts have shapes and types only."""
    copies: dict[int, Any] = {}
    parts = {path: _copy(part, copies) for path, part in parts_of(module).items()}
    made = fx.GraphModule(parts, copy.deepcopy(module.graph), type(module).__name__)
    forget_source_of(made)
    return made


def weightless(module: Some) -> Some:
    """A copy of a module whose tensors are on the meta device; its other attributes are the module's own."""
    return _copy_module(module, {})


def _at(module: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def _copy(part: Any, copies: dict[int, Any]) -> Any:
    if isinstance(part, nn.Module):
        return _copy_module(part, copies)
    return _copy_tensor(part, copies) if isinstance(part, torch.Tensor) else part


def _copy_module(module: Some, copies: dict[int, Any]) -> Some:
    """Not `copy.copy`, which asks modules for a state that can be pickled; parametrized ones refuse."""
    if isinstance(module, torch.jit.ScriptModule):
        return module  # lives in C++
    if id(module) not in copies:
        made = copies[id(module)] = object.__new__(type(module))
        # Tables of hooks and submodules are copied too, so that later changes of the module do not show here.
        made.__dict__.update({n: v.copy() if isinstance(v, dict) else v for n, v in module.__dict__.items()})
        for table in (made.__dict__, parameters_of(made), buffers_of(made), children_of(made)):
            table.update({name: _copy(value, copies) for name, value in table.items()})
    copied: Some = copies[id(module)]
    return copied


def _copy_tensor(tensor: torch.Tensor, copies: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in copies:
        made = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(made.detach(), tensor.requires_grad) if is_parameter else made
    copied: torch.Tensor = copies[id(tensor)]
    return copied
