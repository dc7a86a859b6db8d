"""Tracing a model: torch.nn modules are leaves, every node knows its value, and layers are named after their caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from convmesh.graph.tracing.aliases import changed, lost_change, versions
from convmesh.graph.tracing.closed import (
    OWN_GRADIENTS,
    Closed,
    ClosedError,
    DataDependentError,
    FailedError,
    SharedMemoryError,
)
from convmesh.graph.tracing.closed_output import trial_output
from convmesh.graph.tracing.evaluate import Evaluator, failure, needs_data
from convmesh.graph.tracing.guards import guard
from convmesh.graph.tracing.intercepted_torch import Ambient, this_line, this_place
from convmesh.graph.tracing.multi_head import attend, is_plain
from convmesh.graph.tracing.node_meta import LAYER, PLACE, VALUE, arguments_of, fresh_layer, function_name
from convmesh.graph.tracing.proxy import ValueProxy
from convmesh.private_torch import tree_leaves
from convmesh.private_torch.interception import without_wrapped_functions
from convmesh.private_torch.module_tables import buffers_of, has_hooks, parameters_of

_COMPOSED = (
    nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)  # fmt: skip
"""Torch modules whose forward only calls other modules."""

_AS_TENSOR = torch.as_tensor  # during a trace the name is another function's

_CALLS = ("call_function", "call_method", "call_module")


class LayerTracer(fx.Tracer):
    """Records a model's forward on samples without data. Modules in `closed` are leaves."""

    proxy_buffer_attributes = True

    def __init__(
        self,
        model: nn.Module,
        samples: Mapping[str, torch.Tensor],
        evaluator: Evaluator,
        closed: Mapping[str, Closed],
    ) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._taken = set(self._paths.values())
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that are not attributes of the model: made during the trace, or global."""
        self.failed_in = ""
        """The innermost module in which the trace failed."""
        self._failure: BaseException | None = None
        self._samples = samples
        self._evaluator = evaluator
        self._closed = closed
        self._evaluating = False
        self._ambient = Ambient()
        self._calls: list[tuple[str, Counter[str]]] = [("", Counter())]
        self._attributes: dict[str, fx.Proxy] = {}
        self._baked: dict[fx.Node, str] = {}
        self._asked: dict[fx.Node, str] = {}
        self._cut_off: set[fx.Node] = set()
        self._detached_of: dict[fx.Node, fx.Node] = {}
        self._changes: dict[fx.Node, list[torch.Tensor]] = {}
        self._changed_in: dict[fx.Node, tuple[str, str]] = {}
        self.notices: dict[str, None] = {}
        """Warnings for the user, in order."""

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        """The graph of `root`, the model; call it inside `intercepted(self)`."""
        with without_wrapped_functions():
            graph = super().trace(root, concrete_args)
        self._check_changes(graph)
        for node, line in self._baked.items():
            with graph.inserting_after(node):
                check = graph.call_function(guard, (node, node.meta[VALUE], line))
            check.meta.update({VALUE: None, LAYER: "guard"})
        return graph

    def _check_changes(self, graph: fx.Graph) -> None:
        """Refuse a module that changes a tensor which the network reads under another name afterwards."""
        change = lost_change(graph, self._changes)
        if change is not None:
            self.failed_in, line = self._changed_in[change]
            raise SharedMemoryError(
                f"{line} changes a tensor in place that shares memory with one that is read later; split tensors share "
                "none: write it with a new tensor, `x = x + y` or torch.cat"
            )

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        del is_module, concrete_args
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._samples]
        return root_fn, [self.root, *proxies]

    def proxy(self, node: fx.Node) -> ValueProxy:
        return ValueProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        kind = parametrize.type_before_parametrizations(m)
        from_torch = kind.__module__.startswith(("torch.nn", "torch.ao.nn")) and not issubclass(kind, _COMPOSED)
        return from_torch or module_qualified_name in self._closed

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = self._paths.get(id(m))
        if self._evaluating or path is None:  # a module that is not part of the model is inlined
            return forward(*args, **kwargs)
        if is_plain(m) and path not in self._closed and not has_hooks(m):
            training = self._training_of(path) if m.dropout else False
            return self._inlined(path, partial(attend, m, training), args, kwargs)
        if self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        self._notice_hooks(m, path)
        return self._inlined(path, forward, args, kwargs)

    def _inlined(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._calls.append((path, Counter()))
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            if error is not self._failure:
                self._failure, self.failed_in = error, path
            raise
        finally:
            self._calls.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        del attr, parameter_proxy_cache
        if self._evaluating or not isinstance(attr_val, torch.Tensor) or id(attr_val) not in self._names:
            return attr_val
        return self._attribute(self._names[id(attr_val)])

    def _attribute(self, path: str) -> fx.Proxy:
        if path not in self._attributes:
            self._attributes[path] = self.create_proxy("get_attr", path, (), {})
        return self._attributes[path]

    def training_of(self, module: nn.Module) -> Any:
        """`self.training` becomes a node, so that dropout reads it in every run."""
        path = self._paths.get(id(module))
        if self._evaluating or path is None or self.is_leaf_module(module, path):
            return module.__dict__["training"]
        return self._training_of(path)

    def _training_of(self, path: str) -> fx.Proxy:
        return self._attribute(f"{path}.training" if path else "training")

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, torch.Tensor):
            return self._tensor_node(a)
        return super().create_arg(a)

    def _tensor_node(self, tensor: torch.Tensor) -> fx.Node:
        path = self._names.get(id(tensor)) or self.tensor_attrs.get(tensor)
        if path is None:
            if tensor.requires_grad:
                raise ClosedError("it uses a tensor that learns but is no parameter of the model")
            path = f"_constant_{len(self.constants)}"
            self.constants[path] = tensor
            self.tensor_attrs[tensor] = path
        return self._attribute(path).node

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        if kind in _CALLS:
            self._check_ambient()
            if self._ambient.without_grad():
                args, kwargs = fx.node.map_arg((args, kwargs), self._detached)
        self._baked.update(self._asked)
        self._asked.clear()
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        if kind != "output":
            self._evaluating = True
            try:
                node.meta[VALUE] = self._value(node)
            finally:
                self._evaluating = False
            node.meta.update({LAYER: self._layer(node), PLACE: this_place()})
            if kind in ("call_function", "call_method") and self._ambient.without_grad():
                self._cut_off.add(node)
        return node

    def create_proxy(self, kind: str, target: Any, *rest: Any, **named: Any) -> Any:
        """Under `no_grad`, inputs of calls and outputs of modules are detached, since the graph has no such mode."""
        proxy = super().create_proxy(kind, target, *rest, **named)
        if kind != "call_module" or not self._ambient.without_grad():
            return proxy
        if not isinstance(proxy.node.meta[VALUE], torch.Tensor):
            raise ClosedError("it switches gradients off around a module that returns more than one tensor")
        return self.proxy(self._detached(proxy.node))

    def _detached(self, node: fx.Node) -> fx.Node:
        if not isinstance(node.meta[VALUE], torch.Tensor) or node in self._cut_off:
            return node
        if node not in self._detached_of:
            self._cut_off.add(node)  # or the call of detach would detach its own input
            self._detached_of[node] = self.create_node("call_method", "detach", (node,), {})
            self._cut_off.remove(node)
        return self._detached_of[node]

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._samples[str(node.target)]
        if node.op == "get_attr":
            return self._attribute_value(str(node.target))
        args, kwargs = arguments_of(node, lambda argument: argument.meta[VALUE])
        before = versions((args, kwargs))
        try:
            value = self._evaluator.call(node.op, node.target, args, kwargs)
        except Exception as error:
            return self._without_meta(node, args, kwargs, error)
        self._note_changes(node, changed(before) or self._changed_by_module(node, args))
        return value

    def _changed_by_module(self, node: fx.Node, args: Sequence[Any]) -> list[torch.Tensor]:
        """What modules such as nn.ReLU(inplace=True) change; their outputs may be known without a run."""
        module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        is_changed = getattr(module, "inplace", False) is True and isinstance(args[0], torch.Tensor)
        return [args[0]] if is_changed else []

    def _note_changes(self, node: fx.Node, tensors: list[torch.Tensor]) -> None:
        if tensors:
            self._changes[node], self._changed_in[node] = tensors, (self._calls[-1][0], this_line())

    def _without_meta(self, node: fx.Node, args: Any, kwargs: Any, error: Exception) -> Any:
        """The value of a call that failed with `error` on tensors without data."""
        if not needs_data(error):
            raise self._failed(node, failure(error, args, kwargs)) from error
        if node.op == "call_module" and node.target in self._closed:
            return trial_output(self.root.get_submodule(str(node.target)), args, kwargs, str(node.target))
        name = function_name(node)
        raise DataDependentError(f"the output of `{name}` depends on the data, not on shapes alone") from error

    def _attribute_value(self, path: str) -> Any:
        value: Any = self.constants.get(path)
        if value is None:
            owner, _, name = path.rpartition(".")
            module = self.root.get_submodule(owner)
            value = module.__dict__["training"] if name == "training" else _plain_attribute(module, name)
        return self._evaluator.tensor(value) if isinstance(value, torch.Tensor) else value

    def _failed(self, node: fx.Node, message: str) -> FailedError:
        if node.op != "call_module":
            return FailedError(self._calls[-1][0], f"`{function_name(node)}` raises {message}")
        return FailedError(str(node.target), message, repr(self.root.get_submodule(str(node.target))))

    def _layer(self, node: fx.Node) -> str:
        if node.op not in ("call_function", "call_method"):
            return str(node.target)
        path, counts = self._calls[-1]
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(node.meta[VALUE])):
            return fresh_layer(path, function_name(node), counts, self._taken)
        return f"{path}.{function_name(node)}".lstrip(".")

    def bake(self, proxy: ValueProxy) -> None:
        """Note that Python uses a value: if other samples can change it, the graph checks it in every run."""
        node = proxy.node
        if node.op == "get_attr":
            self._notice_training(str(node.target))
        elif node not in self._baked and _comes_from_shapes(node):
            self._asked[node] = this_line()

    def factory(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a factory, so that every run makes its tensor: noise stays noise, sizes follow the batch."""
        if self._evaluating:
            return function(*args, **kwargs)
        if function is _AS_TENSOR and _stands_for_tensor(args[0]):  # a tensor already: nothing to make
            return args[0].to(*args[1:], **kwargs) if len(args) > 1 or kwargs else args[0]
        for leaf in tree_leaves(args):  # torch reads the number only to check its type
            if type(leaf) is ValueProxy:
                self._asked.pop(leaf.node, None)
        return self.create_proxy("call_function", function, tuple(args), dict(kwargs))

    def autograd_function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._evaluating or not any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        raise ClosedError(OWN_GRADIENTS)

    def _check_ambient(self) -> None:
        if problem := self._ambient.changed():
            raise ClosedError(problem)

    def saved_tensor_hooks(self) -> None:
        if not self._evaluating:
            message = (
                f"layer `{self._calls[-1][0] or '(the model)'}` uses activation checkpointing or offloading: its calls "
                "are inlined and keep their activations, and batch norms in them count a batch once, where recomputing "
                "counts it twice; use the plan's `checkpoint` instead."
            )
            self.notices[message] = None

    def _notice_training(self, path: str) -> None:
        mode = "training" if self._attribute_value(path) else "evaluation"
        message = (
            f"{this_line()} depends on `self.training`: the network is captured as it is in {mode} mode; capture it "
            "again after `.train()` or `.eval()`."
        )
        self.notices[message] = None

    def _notice_hooks(self, module: nn.Module, path: str) -> None:
        if has_hooks(module):
            self.notices[hooks_notice(path)] = None


def hooks_notice(path: str) -> str:
    return (
        f"layer `{path or '(the model)'}` has hooks: changes by forward hooks are captured, but the captured network "
        "does not run the hooks again; put them on torch.nn modules inside it, which keep theirs."
    )


def _stands_for_tensor(value: Any) -> bool:
    return type(value) is ValueProxy and isinstance(value.value, torch.Tensor)


def _plain_attribute(module: nn.Module, name: str) -> Any:
    for table in (parameters_of(module), buffers_of(module), module.__dict__):
        if name in table:
            return table[name]
    raise ClosedError(f"its module has no attribute `{name}` of its own")


def _comes_from_shapes(node: fx.Node) -> bool:
    """Whether a value is a size or computed from sizes; devices and types are not checked again."""
    if node.target is getattr or node.op == "call_method":
        name = node.args[1] if node.target is getattr else node.target
        return name in ("shape", "size", "numel", "nelement")
    return all(isinstance(arg.meta[VALUE], (bool, int, float, tuple)) for arg in node.all_input_nodes)
