"""Runs a network node by node and times each: forward around its call, backward around its autograd operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch import tree_map
from convmesh.profiling.step_recorder import StepRecorder

_UNTIMED = ("placeholder", "output", "get_attr")
_LEAF = "AccumulateGrad"
"""It outlives the step, and sums of gradients leave from it: it is no layer's."""


class BackwardTimer:
    """Gives every autograd operator to the layer whose forward made it."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._owned: set[Any] = set()

    def own(self, layer: str, outputs: Any) -> None:
        """The operators behind `outputs` that no layer has yet."""
        for operator in self._new(_made_by(outputs)):
            operator.register_prehook(self._entering(layer))
            operator.register_hook(self._leaving)

    def forget(self) -> None:
        """The step is over."""
        self._owned.clear()

    def _new(self, waiting: list[Any]) -> Iterator[Any]:
        while waiting:
            operator = waiting.pop()
            if operator is None or operator in self._owned or operator.name().endswith(_LEAF):
                continue
            self._owned.add(operator)
            waiting += [source for source, _ in operator.next_functions]
            yield operator

    def _entering(self, layer: str) -> Callable[[Any], None]:
        def enter(gradients: Any) -> None:
            del gradients
            self._recorder.enter(layer, "backward")

        return enter

    def _leaving(self, inputs: Any, outputs: Any) -> None:
        del inputs, outputs
        self._recorder.leave()


class NodeTimer(fx.Interpreter):
    """The network's own calls, each between two stamps."""

    def __init__(
        self, module: fx.GraphModule, layers: Mapping[str, str], recorder: StepRecorder, backward: BackwardTimer
    ) -> None:
        super().__init__(module)
        self._layers, self._recorder, self._backward = layers, recorder, backward

    def run_node(self, n: fx.Node) -> Any:
        if n.op in _UNTIMED or not torch.is_grad_enabled():  # evaluations are not timed
            return super().run_node(n)
        layer = layer_of(n, self._layers)
        self._recorder.enter(layer, "forward")
        result = super().run_node(n)
        self._recorder.leave()
        self._backward.own(layer, result)
        return result


def layer_of(node: fx.Node, layers: Mapping[str, str]) -> str:
    """A node's layer; a change of layout belongs to the node that it is for, a recomputed block has its own name."""
    arranged = str(node.target).removeprefix("convmesh_arrange_")
    return layers.get(node.name) or layers.get(arranged) or _block(str(node.target))


def _block(target: str) -> str:
    return target.split("_", 3)[-1] if target.startswith("convmesh_region_") else ""


def _made_by(outputs: Any) -> list[Any]:
    operators: list[Any] = []

    def see(value: Any) -> None:
        tensor = value.local if isinstance(value, Sharded) else value
        if isinstance(tensor, torch.Tensor):
            operators.append(tensor.grad_fn)

    tree_map(see, outputs)
    return operators
