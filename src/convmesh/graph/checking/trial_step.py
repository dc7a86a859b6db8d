"""One training step of a network on given weights and inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from convmesh.graph.checking.drawn_values import cotangents, weights_by_name
from convmesh.private_torch import tree_leaves
from convmesh.private_torch.interception import checkpoints_inlined
from convmesh.private_torch.module_tables import standing_in

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepResults:
    """All tensors of a step by name, grouped by kind."""

    outputs: Tensors
    gradients: Tensors
    buffers: Tensors

    @property
    def by_kind(self) -> tuple[tuple[str, Tensors], ...]:
        """Ordered by how much a difference reveals."""
        return ("output", self.outputs), ("gradient of", self.gradients), ("buffer", self.buffers)


@dataclass(frozen=True)
class TrialStep:
    """The values of a step, the same for every network that takes it."""

    model: nn.Module
    weights: Mapping[str, torch.Tensor]
    """Values of all parameters and buffers of the model, by name."""
    inputs: Sequence[torch.Tensor]
    with_gradients: bool = True

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in self.weights.values()), torch.device("cpu"))

    @property
    def batch(self) -> str:
        """`a batch of (2, 3, 8, 8)`, for messages."""
        return f"a batch of {', '.join(str(tuple(x.shape)) for x in self.inputs)}"

    def in_float64(self) -> TrialStep:
        """The same step with more digits."""
        weights = {name: _widened(value) for name, value in self.weights.items()}
        return replace(self, weights=weights, inputs=[_widened(x) for x in self.inputs])

    def of(self, network: nn.Module) -> StepResults:
        """Outputs, gradients and buffers after one step of `network`, which has the parts and names of the model.

        The step works on copies: no weight, gradient or hook of the model's own parameters is touched. What a forward
        stores in Python attributes stays; `unchanged` around all steps takes it back.
        """
        leaves, tensors = self._leaves(), self._tensors()
        with self._copies(network, tensors), self._surroundings():
            # Clones: forward may change its inputs, which autograd forbids for leaves.
            output = network(*(leaf.clone() for leaf in leaves))
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            _backward(outputs)  # with the copies in place, since it may run parts of forward again
        learnt = {**{f"input {i}": leaf for i, leaf in enumerate(leaves)}, **tensors}
        return StepResults(
            {str(index): output.detach() for index, output in enumerate(outputs)},
            {name: tensor.grad for name, tensor in learnt.items() if tensor.grad is not None},
            {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)},
        )

    def _leaves(self) -> list[torch.Tensor]:
        copies = [x.to(self.device, copy=True) for x in self.inputs]
        return [x.requires_grad_() if x.is_floating_point() and self.with_gradients else x for x in copies]

    def _tensors(self) -> Tensors:
        learns = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        # Contiguous, even if the model's are not: oneDNN's gradients of few channels last write past their memory.
        copies = {
            name: value.to(self.device, copy=True, memory_format=torch.contiguous_format)
            for name, value in self.weights.items()
        }
        return {name: nn.Parameter(copy, learns[name]) if name in learns else copy for name, copy in copies.items()}

    def _copies(self, network: nn.Module, tensors: Tensors) -> AbstractContextManager[None]:
        own = weights_by_name(self.model)
        return standing_in((self.model, network), {id(own[name]): tensor for name, tensor in tensors.items()})

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with (
            _fixed_random_numbers(self.device),
            _DrawnByIndex(),
            _one_thread(),
            _without_meta_default(),
            checkpoints_inlined(_tell_nobody),  # or batch norms would count a batch twice
            torch.set_grad_enabled(self.with_gradients),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield


def _tell_nobody() -> None:
    """A trace tells of checkpoints; a step does not again."""


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _backward(outputs: Sequence[torch.Tensor]) -> None:
    pairs = [(y, g) for y, g in zip(outputs, cotangents(outputs), strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def _without_meta_default() -> AbstractContextManager[Any]:
    """A model may be captured inside `torch.device("meta")`: what its forward makes must have data here."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small operators gain nothing from more threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _DrawnByIndex(TorchFunctionMode):
    """Lets dropout draw by index: torch draws in memory order, which may differ for a captured tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func in (F.dropout, torch.dropout) and args and isinstance(args[0], torch.Tensor):
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def _fixed_random_numbers(device: torch.device) -> Iterator[None]:
    """The same random numbers in every block; afterwards the generators are as they were."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(0)  # not torch.manual_seed, which seeds devices that are not restored
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        yield
