"""A model that can be neither traced nor exported, as one node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from convmesh.errors import UnsupportedError
from convmesh.graph.tracing.closed import Closed, DataDependentError, FailedError
from convmesh.graph.tracing.closed_output import trial_output
from convmesh.graph.tracing.evaluate import Evaluator, failure, needs_data
from convmesh.graph.tracing.node_meta import LAYER, VALUE


class WholeValue:
    """Calls the model itself, in the mode of the captured module."""

    def __init__(self, model: nn.Module, closed: Closed) -> None:
        self.model, self._closed = model, closed
        self.__name__ = "whole_model"  # a graph names the functions it calls

    def __call__(self, training: bool, *samples: Any) -> Any:
        if not all(isinstance(sample, torch.Tensor) for sample in samples):  # they are cut over ranks
            at = f" ({self._closed.line})" if self._closed.line else ""
            raise UnsupportedError(
                f"the model's own forward cannot be looked into{at}: {self._closed.reason}. Move that line into an "
                "nn.Module of its own, which then runs on whole samples, or use torch.where instead of a mask."
            )
        self.model.training = training
        return self.model(*samples)


def whole_graph(model: nn.Module, samples: Mapping[str, torch.Tensor], output: Any, closed: Closed) -> fx.Graph:
    """Inputs, one call, output."""
    graph = fx.Graph()
    training = graph.create_node("get_attr", "training")
    training.meta.update({VALUE: model.training, LAYER: "training"})
    inputs = []
    for name, value in samples.items():
        inputs.append(graph.placeholder(name))
        inputs[-1].meta.update({VALUE: value, LAYER: name})
    call = graph.call_function(WholeValue(model, closed), (training, *inputs))
    call.meta.update({VALUE: output, LAYER: "model"})
    graph.output(call)
    return graph


def whole_output(model: nn.Module, samples: Mapping[str, torch.Tensor], evaluator: Evaluator) -> tuple[Any, bool]:
    """The model's output, and whether its shapes depend on data."""
    args = tuple(samples.values())
    try:
        return evaluator.call("call_module", "", args, {}), False
    except Exception as error:
        if isinstance(error, (FailedError, DataDependentError)):
            raise
        if not needs_data(error):
            raise FailedError("", failure(error, args, {})) from error
    return trial_output(model, args, {}, ""), True
