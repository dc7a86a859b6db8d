"""Capturing a model: the calls that it makes and their shapes, compared with the model itself on real data."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from convmesh.errors import CaptureError, CaptureWarning, OpaqueLayerWarning
from convmesh.graph.checking.check_capture import CaptureCheck
from convmesh.graph.checking.drawn_values import has_values
from convmesh.graph.graph import Graph
from convmesh.graph.tracing.assemble import assemble
from convmesh.graph.tracing.closed import Closed, ClosedError, FailedError, SharedMemoryError, closed_by
from convmesh.graph.tracing.closed_samples import sees_whole_batch
from convmesh.graph.tracing.describe import describe
from convmesh.graph.tracing.evaluate import META, Evaluator
from convmesh.graph.tracing.exported import exported
from convmesh.graph.tracing.intercepted_torch import intercepted
from convmesh.graph.tracing.node_meta import VALUE
from convmesh.graph.tracing.opaque_model import whole_graph, whole_output
from convmesh.graph.tracing.tracer import LayerTracer, hooks_notice
from convmesh.graph.unchanged_module import unchanged
from convmesh.graph.weightless import Own, is_from, own_parts, weightless_graph
from convmesh.private_torch.module_tables import has_hooks, parameters_of

Sample = torch.Tensor | Sequence[int]


@dataclass(frozen=True)
class Captured:
    """A network as values, and as a module that runs it."""

    graph: Graph
    module: fx.GraphModule
    """Its nodes have the names of `graph`'s nodes; its submodules and parameters are the model's own."""
    values: Mapping[str, Any]
    """The output of each node: tensors on the meta device, numbers, shapes, tuples of them."""
    constants: Mapping[str, torch.Tensor]
    """Tensors of `module` that are not attributes of the model."""
    own: Own
    """The parts of the model that `module` calls or reads."""
    unchecked: str = ""
    """Why the network was not compared with the model; empty if it was, and agrees."""
    follows_extents: bool = True
    """Whether the network may run on extents other than its own; it then checks them itself."""
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What later steps derive from the graph and cache, such as lowered plans; shared with the versions below."""

    def without_weights(self) -> Captured:
        """The network for plans: `module` has shapes and types only, and keeps nothing of the model alive."""
        return replace(self, module=weightless_graph(self.module))

    def of_model(self, model: nn.Module) -> Captured | None:
        """The network with the model's own modules and parameters; None if it was captured from another model."""
        if not is_from(self.own, model):
            return None
        return replace(self, module=assemble(model, copy.deepcopy(self.module.graph), self.constants))


def capture(model: nn.Module, *samples: Sample, dtype: torch.dtype | None = None, check: bool = True) -> Captured:
    """The network of `model` for a global batch like `samples`, each a tensor or a shape.

    Shapes have `dtype`, or the type of the model's first floating parameter. With `check`, one training step of the
    captured network is compared with the model's own, on as small a batch as both allow and on copies of the weights;
    a network that differs from the model is refused. If they cannot be compared, a `CaptureWarning` says why; for a
    model on the meta device whose weights cannot be drawn, only `unchecked` does.

    A module stays closed (one opaque node, with an `OpaqueLayerWarning`) if its forward depends on the values of
    tensors, switches autocast, or uses a custom torch.autograd.Function. Activation checkpointing is inlined.
    `self.training` is read in every run where it is an argument, and fixed where Python branches on it. Parametrized
    modules (weight_norm, spectral_norm) are leaves; their weights are the original ones.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"`model` (={model!r:.80}) must be a torch.nn.Module; it is a {type(model).__name__}.")
    _check_initialised(model)
    named = _named(model, [_without_data(model, sample, dtype) for sample in samples])
    try:
        with unchanged(model):  # what a forward stores must not outlive the trace: it would hold proxies
            traced = _trace(model, named, Evaluator(model, _home(model)))
    except FailedError as error:
        raise CaptureError(f"{error.layer} fails on the sample {_shapes(named)}: {error}") from error
    _check_output(traced.graph)
    traced = _with_batches(traced, model)
    for closed in traced.closed.values():
        warnings.warn(closed.notice, OpaqueLayerWarning, stacklevel=2)
    for message in traced.notices:
        warnings.warn(message, CaptureWarning, stacklevel=2)
    values = {node.name: node.meta[VALUE] for node in traced.graph.nodes if node.op != "output"}
    graph = describe(traced.graph, model, traced.closed)
    module = assemble(model, traced.graph, traced.constants)
    own = own_parts(module, traced.constants)
    unchecked = "" if "" in traced.closed else "it was not asked for"  # a closed model runs itself
    captured = Captured(graph, module, values, traced.constants, own, unchecked, not traced.is_exported)
    return compared(captured, model, samples) if check else captured


def compared(captured: Captured, model: nn.Module, samples: Sequence[Sample] = ()) -> Captured:
    """The captured network, now compared with the model if it was not before; `samples` may hold data for that."""
    if not captured.unchecked:
        return captured
    given = samples or [node.outputs[0].shape for node in captured.graph.inputs]
    tried = [sample if isinstance(sample, torch.Tensor) else tuple(sample) for sample in given]
    unchecked = CaptureCheck(model, captured.module, captured.graph, tried, captured.follows_extents).run()
    if unchecked and has_values(model):
        message = f"the captured network was not compared with the model: {unchecked}. `convmesh verify` compares them."
        warnings.warn(message, CaptureWarning, stacklevel=3)
    return replace(captured, unchecked=unchecked)


@dataclass(frozen=True)
class _Traced:
    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]
    closed: Mapping[str, Closed]
    notices: tuple[str, ...] = ()
    is_exported: bool = False


def _trace(model: nn.Module, samples: Mapping[str, torch.Tensor], evaluator: Evaluator) -> _Traced:
    """Trace, and close the module that fails, until a trace of the model succeeds or the model itself fails."""
    closed: dict[str, Closed] = {}
    while True:
        tracer = LayerTracer(model, samples, evaluator, closed)
        outcome = _attempt(tracer, model)
        if isinstance(outcome, fx.Graph):
            return _finished(model, tracer, outcome, closed)
        if not tracer.failed_in:
            if isinstance(outcome, SharedMemoryError):
                raise CaptureError(f"{outcome}, or put it into a module of its own, which then runs on whole samples.")
            return _closed_root(model, samples, evaluator, closed_by("", outcome))
        closed[tracer.failed_in] = closed_by(tracer.failed_in, outcome)


def _with_batches(traced: _Traced, model: nn.Module) -> _Traced:
    """With what is found out about closed modules by running them."""
    whole = sees_whole_batch(model, traced.graph, traced.closed)
    closed = {path: replace(why, whole_batch=path in whole) for path, why in traced.closed.items()}
    return replace(traced, closed=closed)


def _attempt(tracer: LayerTracer, model: nn.Module) -> fx.Graph | Exception:
    """The graph, or the error that stopped the trace; errors of the interception, our own defects, are raised."""
    with intercepted(tracer):
        try:
            return tracer.trace(model)
        except FailedError:
            raise
        except Exception as error:
            return error


def _finished(model: nn.Module, tracer: LayerTracer, graph: fx.Graph, closed: Mapping[str, Closed]) -> _Traced:
    hooks = (hooks_notice(""),) if has_hooks(model) else ()
    called = {node.target for node in graph.nodes}  # a closed module inside another closed one is not called
    kept = {path: why for path, why in closed.items() if path in called}
    return _Traced(graph, tracer.constants, kept, (*tracer.notices, *hooks))


def _closed_root(
    model: nn.Module, samples: Mapping[str, torch.Tensor], evaluator: Evaluator, closed: Closed
) -> _Traced:
    """The model captured by torch.export if its forward needs no data; otherwise the whole model as one node."""
    output, needed_data = whole_output(model, samples, evaluator)
    if not needed_data:
        try:
            return _Traced(*exported(model, samples, evaluator), {}, (_exported_notice(closed),), is_exported=True)
        except ClosedError:
            pass  # for the same reason
        except Exception as error:  # export raises errors of many kinds
            closed = replace(closed, reason=f"{closed.reason}; torch.export fails too: {type(error).__name__}")
    return _Traced(whole_graph(model, samples, output, closed), {}, {"": closed})


def _exported_notice(closed: Closed) -> str:
    return (
        f"the model's own forward cannot be traced ({closed.line}): {closed.reason}. It is captured by torch.export: "
        "modes and devices that its forward reads stay as they are now; those of its torch.nn modules do not."
    )


def _check_initialised(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if any(nn.parameter.is_lazy(p) for p in parameters_of(module).values()):
            raise CaptureError(
                f"layer `{path}` ({type(module).__name__}) is lazy and not initialised: run a batch through the model "
                "before you capture it."
            )


def _check_output(graph: fx.Graph) -> None:
    """Refuse outputs whose tensors nobody would find."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        if is_dataclass(value := node.meta[VALUE]):
            raise CaptureError(
                f"the model returns {type(value).__name__}, a dataclass; return a tensor, or a tuple, list or dict of "
                "tensors: `vars(output)` is one."
            )


def _named(model: nn.Module, samples: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Samples by the name of their argument; arguments without a sample keep their defaults."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*samples)
    except TypeError as error:
        raise CaptureError(
            f"`samples` ({len(samples)} given) must be one for each argument without a default of "
            f"forward{signature}: {error}."
        ) from error
    named: dict[str, torch.Tensor] = {}
    for name, value in bound.arguments.items():
        several = isinstance(value, tuple)
        named.update({f"{name}_{i}": item for i, item in enumerate(value)} if several else {name: value})
    return named


def _without_data(model: nn.Module, sample: Sample, dtype: torch.dtype | None) -> torch.Tensor:
    if isinstance(sample, torch.Tensor):
        return torch.empty(sample.shape, dtype=sample.dtype, device=META, requires_grad=sample.requires_grad)
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        return torch.empty(tuple(sample), dtype=dtype or next(floating, None), device=META)
    except (TypeError, RuntimeError) as error:
        raise CaptureError(f"`samples`: {sample!r:.80} must be a tensor or a shape of whole numbers.") from error


def _home(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _shapes(samples: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in samples.items())
