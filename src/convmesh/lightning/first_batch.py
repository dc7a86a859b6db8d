"""The inputs of the network: found by running the user's training step up to its call of the network."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from convmesh.errors import PlanError

_SAY = "say it: `MeshStrategy(sample=(8, 3, 224, 224))`, the shape of a global batch"


class Reached(BaseException):
    """The network was called: not an error, so that the step's own handlers leave it alone."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def first_batch(loader: Any) -> Any:
    """A batch like the loader's first, without drawing from its sampler: one sample, repeated to the batch's size."""
    if isinstance(loader, Mapping):
        return {key: first_batch(each) for key, each in loader.items()}
    if isinstance(loader, list | tuple):
        return [first_batch(each) for each in loader]
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler:
        indices = next(iter(loader.batch_sampler), None)
        if not indices:
            raise PlanError(f"the loader has no batch, so the network's inputs are not known; {_SAY}.")
        return loader.collate_fn([loader.dataset[indices[0]]] * len(indices))
    walk = iter(loader)
    if walk is loader:
        raise PlanError(f"the loader can be read once only, so the network's inputs are not known; {_SAY}.")
    return next(walk)


def inputs_of_step(
    step: Callable[..., Any], batch: Any, module: nn.Module, network: nn.Module, shown: str
) -> tuple[Any, ...]:
    """The arguments with which `step` calls `network`; nothing is logged, and nothing runs after that call."""
    silent = {(network, "forward"): _reach(network.forward), (module, "log"): _nothing}
    for (owner, name), value in silent.items():
        owner.__dict__[name] = value
    try:
        with torch.no_grad():
            step(*(batch, 0)[: _positional(step)])
    except Reached as reached:
        return reached.inputs
    except Exception as error:
        message = f"`{step.__name__}` failed before it called {shown} ({type(error).__name__}: {error}); {_SAY}"
        raise PlanError(f"{message}.") from error
    finally:
        for owner, name in silent:
            del owner.__dict__[name]
    raise PlanError(f"`{step.__name__}` does not call {shown}; name the network that it calls: `network='...'`.")


def positional(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The tensors of a call in the order of the parameters; other values must be the parameters' defaults."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    parameters = inspect.signature(forward).parameters
    values: list[Any] = []
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            values += value
        elif value is not parameters[name].default:
            values.append(value)
    return tuple(values)


def _reach(forward: Callable[..., Any]) -> Callable[..., NoReturn]:
    def reached(*args: Any, **kwargs: Any) -> NoReturn:
        raise Reached(positional(forward, args, kwargs))

    return reached


def _positional(step: Callable[..., Any]) -> int:
    """How many arguments, of batch and index, the step takes."""
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 2
    return sum(kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds)


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
