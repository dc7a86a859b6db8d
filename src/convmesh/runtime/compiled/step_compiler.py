"""What runs a traced step's local operators: torch's compiler, or the operators themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from convmesh.errors import PlanError
from convmesh.private_torch.inductor import compile_graph

BACKENDS = ("inductor", "eager")

Tell = Callable[[str], None]


def backend_of(choice: bool | str) -> str | None:
    """The backend that `compile` names: Inductor for True, none for False."""
    if isinstance(choice, str) and choice not in BACKENDS:
        raise PlanError(
            f"`compile` (={choice!r}) must be True, False, 'inductor', or 'eager', which replays the step's operators "
            "as they are."
        )
    return choice if isinstance(choice, str) else "inductor" if choice else None


@cache
def missing_compiler(device: str) -> str | None:
    """Why torch's compiler cannot work here, from a try; None if it can."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, x)),))
    try:
        example = torch.ones(64, device=device)
        compile_graph(fx.GraphModule({}, graph), [example])([example])
    except Exception as error:  # whatever a broken installation raises
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """An error in a line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text:.160}" if text else type(error).__name__


class Uncompiled:
    """A run of operators as traced."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = self._module(*arguments)
        return results


class Compiled:
    """The same, compiled when it first runs: only then the memory formats of its inputs are known.

    If the compiler fails, the run stays as traced: its values are the same.
    """

    def __init__(self, module: fx.GraphModule, tell: Tell) -> None:
        self._module, self._tell = module, tell
        self._run: Callable[[list[Any]], Sequence[Any]] | None = None

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        if self._run is None:
            self._run = self._compiled(arguments)
        return self._run(arguments)

    def _compiled(self, arguments: list[Any]) -> Callable[[list[Any]], Sequence[Any]]:
        try:
            return compile_graph(self._module, list(arguments))
        except Exception as error:  # the compiler's own errors have no common base
            self._tell(f"torch's compiler failed on a part of the step, which runs uncompiled ({first_line(error)})")
            return Uncompiled(self._module)
