"""One training step of a network on given weights and inputs, which leaves no trace in the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from convmesh.graph.checking.drawn_values import cotangents
from convmesh.graph.unchanged_module import unchanged
from convmesh.private_torch import tree_leaves
from convmesh.private_torch.module_tables import buffers_of, parameters_of

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepResults:
    """All tensors of a step by name, those of one kind together."""

    outputs: Tensors
    gradients: Tensors
    buffers: Tensors

    @property
    def by_kind(self) -> tuple[tuple[str, Tensors], ...]:
        """In the order in which a difference tells most."""
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

    def of(self, network: nn.Module) -> StepResults:
        """Outputs, gradients and buffers after one step of `network`, which has the parts and names of the model."""
        leaves, tensors = self._leaves(), self._tensors()
        with self._surroundings(network):
            # Copies: forward may change its inputs, which autograd forbids for leaves.
            given = tuple(leaf.clone() for leaf in leaves)
            values = {f"network.{name}": tensor for name, tensor in self._placed(network, tensors).items()}
            outputs = functional_call(_ForwardAndBackward(network), values, given, tie_weights=False)
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
        """Copies, so that no value, gradient or hook of the model's own is touched."""
        learns = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        copies = {name: value.to(self.device, copy=True) for name, value in self.weights.items()}
        return {name: nn.Parameter(copy, learns[name]) if name in learns else copy for name, copy in copies.items()}

    def _placed(self, network: nn.Module, tensors: Tensors) -> Tensors:
        """The tensors by their places in `network`, each place once.

        A module that a model has under two names is one place: torch would replace its weights twice, and then put
        back the first replacement instead of the model's own.
        """
        named = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        by_original = {id(original): tensors[name] for name, original in named if name in tensors}
        return {
            f"{path}.{name}" if path else name: by_original[id(original)]
            for path, module in network.named_modules()
            for name, original in (*parameters_of(module).items(), *buffers_of(module).items())
            if id(original) in by_original
        }

    @contextmanager
    def _surroundings(self, network: nn.Module) -> Iterator[None]:
        with (
            unchanged(self.model),
            unchanged(network),
            _fixed_random_numbers(self.device),
            _one_thread(),
            _without_meta_default(),
            torch.set_grad_enabled(self.with_gradients),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield


class _ForwardAndBackward(nn.Module):
    """Both in one call, since backward may run parts of forward again and must find the same weights."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = [leaf for leaf in tree_leaves(self.network(*inputs)) if isinstance(leaf, torch.Tensor)]
        pairs = [(y, g) for y, g in zip(outputs, cotangents(outputs), strict=True) if y.requires_grad]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        return outputs


def _without_meta_default() -> AbstractContextManager[Any]:
    """A model may be captured inside `torch.device("meta")`: what its forward makes must have data here."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small operators gain nothing from more, which on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
