"""Networks by path: `package.module:factory`. Every way to fail has its own error."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from convmesh.errors import UnknownNameError

if TYPE_CHECKING:
    from torch import nn

Factory = Callable[..., Any]


def import_factory(path: str, argument: str = "model") -> Factory:
    """The callable that `path` names; errors call it `argument`."""
    module_name, _, attribute = path.partition(":")
    target: Any = _import(path, module_name, argument)
    for name in attribute.split("."):
        if not hasattr(target, name):
            raise UnknownNameError(f"`{argument}` (={path!r}): {_unknown(target, module_name, name)}")
        target = getattr(target, name)
    if not callable(target):
        raise UnknownNameError(
            f"`{argument}` (={path!r}) is a {type(target).__name__}, which cannot be called; "
            "name a function or a class."
        )
    factory: Factory = target
    return factory


def _unknown(module: Any, module_name: str, name: str) -> str:
    """Says that a module has no such name, and what may be meant: what it defines itself, if it defines anything."""
    public = {key: getattr(module, key) for key in dir(module) if not key.startswith("_")}
    own = [key for key, value in public.items() if callable(value) and _is_of(value, module_name)]
    near = difflib.get_close_matches(name, own or public, 1)
    offer = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(own or public)) or 'nothing to call'}."
    return f"`{module_name}` has no {name!r}; {offer}"


def _is_of(value: Any, module_name: str) -> bool:
    """Whether a module defines a value, rather than having imported it from elsewhere."""
    origin = getattr(value, "__module__", None)
    return isinstance(origin, str) and f"{origin}.".startswith(f"{module_name}.")


def _import(path: str, module_name: str, argument: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # whatever the module's own code raises
        raise UnknownNameError(
            f"`{argument}` (={path!r}): `{module_name}` cannot be imported ({type(error).__name__}: {error}); "
            "is the folder that holds it on PYTHONPATH?"
        ) from error


def build(name: str, factory: Factory, sizes: Mapping[str, Any]) -> nn.Module:
    """Call the factory; refuse sizes that it does not take and results that are not networks."""
    _check_sizes(name, factory, sizes)
    net = factory(**sizes)
    from torch import nn

    if not isinstance(net, nn.Module):
        raise UnknownNameError(f"`model` (={name!r}) returned a {type(net).__name__}; it must return an nn.Module.")
    return net


def _check_sizes(name: str, factory: Factory, sizes: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a builtin without a signature
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for size in sizes:
        if size not in named:
            raise UnknownNameError.of(f"size` of `{name}", size, named)
    missing = [key for key, p in named.items() if p.default is p.empty and key not in sizes]
    if missing:
        raise UnknownNameError(f"`model` (={name!r}) needs a value for {', '.join(missing)}; pass it by name.")
