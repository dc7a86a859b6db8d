"""Telling a listener which layer runs: forward around each call, backward around its autograd operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import fx

from convmesh.ops.core.sharded import Sharded
from convmesh.plans.loss_memory import LOSS
from convmesh.private_torch import tree_map

_UNTIMED = ("placeholder", "output", "get_attr")
_LEAF = "AccumulateGrad"
"""It outlives the step, and sums of gradients leave from it: it belongs to no layer."""


class LayerListener(Protocol):
    """Told of every layer of a step; layers run one after another."""

    def enter(self, layer: str, phase: str) -> None: ...

    def leave(self) -> None: ...


class HasLoss(Protocol):
    """An engine that computes its loss in a separate call."""

    loss: Any


class Following:
    """A network's calls and loss, followed until `end`, which removes everything that was attached."""

    def __init__(
        self,
        engine: HasLoss,
        networks: Sequence[fx.GraphModule],
        layers: Mapping[str, str],
        listener: LayerListener,
    ) -> None:
        """`layers` names the layers of nodes."""
        self._engine, self._networks, self._listener = engine, networks, listener
        self._backward = _FollowedOperators(listener)
        # While it is followed, a step may be traced, which follows it too.
        self._earlier = [vars(network).get("forward") for network in networks]
        for network in networks:
            network.forward = _FollowedCalls(network, layers, listener, self._backward).run
        self._loss = engine.loss
        if engine.loss is not None:
            engine.loss = self._followed_loss

    def _followed_loss(self, *args: Any, **kwargs: Any) -> Any:
        self._listener.enter(LOSS, "forward")
        loss = self._loss(*args, **kwargs)
        self._listener.leave()
        self._backward.own(LOSS, loss)
        return loss

    def forget(self) -> None:
        """A step is over."""
        self._backward.forget()

    def end(self) -> None:
        for network, earlier in zip(self._networks, self._earlier, strict=True):
            if earlier is not None:
                network.forward = earlier
            else:
                del network.forward  # which uncovers the class's own
        self._engine.loss = self._loss
        self.forget()


@contextmanager
def followed(
    engine: HasLoss, networks: Sequence[fx.GraphModule], layers: Mapping[str, str], listener: LayerListener
) -> Iterator[None]:
    """Follow the layers that run in here."""
    following = Following(engine, networks, layers, listener)
    try:
        yield
    finally:
        following.end()


class _FollowedOperators:
    """Assigns every autograd operator to the layer whose forward made it."""

    def __init__(self, listener: LayerListener) -> None:
        self._listener = listener
        self._owned: set[Any] = set()

    def own(self, layer: str, outputs: Any) -> None:
        """Assign the operators behind `outputs` that no layer has yet."""
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
            self._listener.enter(layer, "backward")

        return enter

    def _leaving(self, inputs: Any, outputs: Any) -> None:
        del inputs, outputs
        self._listener.leave()


class _FollowedCalls(fx.Interpreter):
    """The network's own calls, one by one."""

    def __init__(
        self, module: fx.GraphModule, layers: Mapping[str, str], listener: LayerListener, backward: _FollowedOperators
    ) -> None:
        super().__init__(module)
        self._layers, self._listener, self._backward = layers, listener, backward

    def run_node(self, n: fx.Node) -> Any:
        if n.op in _UNTIMED or not torch.is_grad_enabled():  # evaluations are not followed
            return super().run_node(n)
        layer = layer_of(n, self._layers)
        self._listener.enter(layer, "forward")
        result = super().run_node(n)
        self._listener.leave()
        self._backward.own(layer, result)
        return result


def layer_of(node: fx.Node, layers: Mapping[str, str]) -> str:
    """A node's layer; a change of layout belongs to the node that it serves, a recomputed block has its own name."""
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
