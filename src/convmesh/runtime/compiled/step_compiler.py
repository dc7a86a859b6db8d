"""What runs a traced step's local operators: torch's compiler, or the operators themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from convmesh.errors import PlanError
from convmesh.private_torch.inductor import compile_graph
from convmesh.private_torch.tensor_internals import memory_key
from convmesh.private_torch.tracing import returns_views

BACKENDS = ("inductor", "max-autotune", "eager")

Tell = Callable[[str], None]
Run = Callable[[list[Any]], Sequence[Any]]
"""A run of local operators, on a list of tensors that it may empty."""


def backend_of(choice: bool | str) -> str | None:
    """The backend that `compile` names: Inductor for True, none for False."""
    if isinstance(choice, str) and choice not in BACKENDS:
        raise PlanError(
            f"`compile` (={choice!r}) must be True, False, 'inductor', 'max-autotune', which tries more kernels, or "
            "'eager', which replays the step's operators as they are."
        )
    return choice if isinstance(choice, str) else "inductor" if choice else None


@cache
def missing_compiler(device: str) -> str | None:
    """Why torch's compiler does not work here, found by trying; None if it works."""
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
    """An error as one line."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text:.160}" if text else type(error).__name__


class Uncompiled:
    """A run of operators as traced."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = self._module(*arguments)
        return results


class StepCompiler:
    """Compiles runs of operators; equal ones once, as networks repeat their blocks."""

    def __init__(self, tell: Tell, tunes: bool = False) -> None:
        self.tell, self._tunes = tell, tunes
        self.joins = False
        """Whether small kernels share a launch: on a GPU, where transfers cut a step into many short runs."""
        self._known: dict[Hashable, Run] = {}

    def of_run(self, module: fx.GraphModule) -> Run:
        """A run, compiled when it first runs. A single operator stays as it is: it has nothing to fuse with."""
        work = [n for n in module.graph.nodes if n.op == "call_function" and not _is_bookkeeping(n)]
        return Uncompiled(module) if len(work) < 2 else Compiled(module, self)

    def compiled(self, module: fx.GraphModule, arguments: list[Any]) -> Run:
        """The run for arguments of these shapes and memory formats.

        If the compiler fails, the run stays as traced: its values are the same.
        """
        key = _graph_key(module), _arguments_key(arguments), self.joins
        if key not in self._known:
            try:
                self._known[key] = compile_graph(module, list(arguments), self._tunes, self.joins)
            except Exception as error:  # the compiler's own errors have no common base
                self.tell(f"torch's compiler failed on a part of the step ({first_line(error)})")
                self._known[key] = Uncompiled(module)
        return self._known[key]


class Compiled:
    """A run that is compiled when it first runs: only then are the memory formats of its inputs known."""

    def __init__(self, module: fx.GraphModule, compiler: StepCompiler) -> None:
        self._module, self._compiler = module, compiler
        self._run: Run | None = None

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        if self._run is None:
            self._run = self._compiler.compiled(self._module, arguments)
        return self._run(arguments)


def _is_bookkeeping(node: fx.Node) -> bool:
    return node.target is operator.getitem or returns_views(node.target)


def _graph_key(module: fx.GraphModule) -> Hashable:
    """Equal for graphs that compute the same: operators and the sources of their arguments, without names."""
    places = {node: f"%{place}" for place, node in enumerate(module.graph.nodes)}
    return tuple((node.op, _target(module, node), _written(node, places)) for node in module.graph.nodes)


def _target(module: fx.GraphModule, node: fx.Node) -> Hashable:
    if node.op == "get_attr":
        return id(getattr(module, str(node.target)))
    return node.target if node.op == "call_function" else ""


def _written(node: fx.Node, places: dict[fx.Node, str]) -> str:
    return repr(fx.map_arg((node.args, node.kwargs), lambda n: places[n])) if node.op != "placeholder" else ""


def _arguments_key(arguments: list[Any]) -> Hashable:
    """Shapes, strides, types, devices, and which arguments share memory."""
    memory: dict[int, int] = {}
    return tuple(
        (tuple(t.shape), t.stride(), t.dtype, t.device, memory.setdefault(memory_key(t), len(memory)))
        for t in arguments
    )
