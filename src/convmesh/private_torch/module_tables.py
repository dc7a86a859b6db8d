"""The tables in which an nn.Module keeps its state: public methods list the entries, but cannot replace them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

Table = dict[str, Any]


def parameters_of(module: nn.Module) -> Table:
    """A module's own parameters by name: the table itself, so that entries can be replaced by any tensor or None."""
    return module._parameters


def buffers_of(module: nn.Module) -> Table:
    """A module's own buffers by name: the table itself."""
    return module._buffers


def children_of(module: nn.Module) -> Table:
    """A module's own parts by name: the table itself, None entries included."""
    return module._modules


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and its parts, each once. `modules()` nests one generator per level, which takes ten times as long."""
    seen = {id(module): module}
    waiting = [module]
    while waiting:
        for part in waiting.pop()._modules.values():
            if part is not None and id(part) not in seen:
                seen[id(part)] = part
                waiting.append(part)
    return list(seen.values())


def part_at(module: nn.Module, path: str) -> nn.Module:
    """The part of a module at a valid path. `get_submodule` checks every name, and takes ten times as long."""
    for name in path.split("."):
        module = module._modules[name]  # type: ignore[assignment]
    return module


def give_tables(module: nn.Module, parameters: Table, buffers: Table) -> None:
    """Replace a module's tables without checking them: a module may hold tensors without data."""
    module.__dict__["_parameters"] = parameters
    module.__dict__["_buffers"] = buffers


def share_state(module: nn.Module, model: nn.Module) -> None:
    """Let `module` keep its state in `model`'s tables, under the same names."""
    give_tables(module, model._parameters, model._buffers)
    module.__dict__["_modules"] = model._modules
    module.__dict__["_non_persistent_buffers_set"] = model._non_persistent_buffers_set


def copy_state(module: nn.Module, model: nn.Module) -> None:
    """Give `module` the parameters, buffers and parts of `model`, in its own tables."""
    module._parameters.update(model._parameters)
    module._buffers.update(model._buffers)
    module._modules.update(model._modules)
    module._non_persistent_buffers_set.update(model._non_persistent_buffers_set)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module's forward is hooked: torch has no public way to ask."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooks_of(module: nn.Module) -> list[Any]:
    """The functions hooked to a module's forward and backward."""
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for table in tables if table for hook in table.values()] if any(tables) else []


def has_hooks(module: nn.Module) -> bool:
    """The same for forward and backward."""
    return bool(hooks_of(module))


def keep_apart(module: nn.RNNBase) -> None:
    """Leave a recurrent layer's weights where they are: torch would copy those on a GPU into one run of memory, for a
    kernel that the layer no longer calls, and cannot do so with cut ones."""
    module.__dict__["flatten_parameters"] = _nothing


def _nothing() -> None:
    """Replaces `flatten_parameters`; a named function, so that models can be pickled."""


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parameters and buffers of a module and its parts, each under its first name."""
    if module._modules:
        yield from module.named_parameters()
        yield from module.named_buffers()
        return
    for table in (module._parameters, module._buffers):  # the same for a layer, in a tenth of the time
        seen: set[int] = set()
        for name, tensor in table.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def call_with(module: nn.Module, tensors: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a module with other tensors in place of its own, by the names of `named_tensors`."""
    stand_ins = {id(tensor): tensors[name] for name, tensor in named_tensors(module) if name in tensors}
    with standing_in([module], stand_ins):
        return module(*args, **kwargs)


@contextmanager
def standing_in(modules: Sequence[nn.Module], stand_ins: Mapping[int, Any]) -> Iterator[None]:
    """Inside the block, other tensors stand in for those with the given ids, wherever the modules hold them.

    torch.func.functional_call does not restore the parameters of a part that has two names.
    """
    tables = [table for module in modules for part in module.modules() for table in (part._parameters, part._buffers)]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.update({name: stand_ins[id(tensor)] for name, tensor in table.items() if id(tensor) in stand_ins})
    try:
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)  # type: ignore[arg-type]
