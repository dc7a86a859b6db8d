"""Lowering: a plan worked out for a network, by a dry run node by node on one rank of the plan's mesh.

The operators that run are the runtime's own, on tensors without data, so a program cannot differ from what is executed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from convmesh.dist import StepSettings, dry_mesh
from convmesh.errors import ConvMeshError, PlanError, UnsupportedError
from convmesh.graph import Captured, Node
from convmesh.graph.tracing.node_meta import arguments_of
from convmesh.kernels.memory_format import channels_last_order, is_channels_last
from convmesh.layout import Layout
from convmesh.lowering.arrange import arrange, arranged_layout
from convmesh.lowering.channel_rules import LAYERS
from convmesh.lowering.dry_run import DryRunner
from convmesh.lowering.dry_values import Dry, DryResult, Strides
from convmesh.lowering.gradient_strides import Place, Returning, Visit
from convmesh.lowering.gradient_sums import with_sums
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.lowering_cache import Problem, cache_of
from convmesh.lowering.opaque import by_samples as by_samples_only
from convmesh.lowering.opaque import is_opaque, opaque_layout
from convmesh.lowering.operator_calls import dtype_name
from convmesh.lowering.stage_program import microbatch, on_stage, stages_by_node
from convmesh.lowering.weight_cuts import Axes, DryWeights, shared_sums, weight_programs, without_data
from convmesh.plans import NodeProgram, Plan, Program, Split, Work, split_nodes
from convmesh.private_torch import tree_leaves, tree_map

Run = Callable[..., DryResult]


def lower(captured: Captured, plan: Plan, rank: int = 0, samples: int | None = None, device: str = "cuda") -> Lowered:
    """Lower a plan for one rank; needs no processes.

    `samples` is the global batch, or micro-batch of a pipeline, if it is not the plan's own. `device` is the kind of
    device, cpu or cuda, whose kernels the program names.
    """
    if plan.pipeline is None:
        return _whole(captured, plan, rank, samples, device)
    micro = samples or microbatch(captured.graph, plan.pipeline)

    def staged() -> Lowered:
        # Ranks that differ in their stage alone share one walk; the pipe axis is the outermost.
        first = rank % (plan.mesh.size // plan.mesh.axes.get("pipe", 1))
        whole = _whole(captured, plan, first, micro, device)
        return on_stage(whole, captured.graph, dry_mesh(plan.mesh, rank, device))

    return cache_of(captured).lowered(captured, Problem(plan, rank, micro, device, of_stage=True), staged)


def _whole(captured: Captured, plan: Plan, rank: int, samples: int | None, device: str) -> Lowered:
    """All layers of the network, on a rank of every stage."""
    problem = Problem(plan, rank, samples, device)
    return cache_of(captured).lowered(captured, problem, Lowering(captured, plan, rank, samples, device).run)


def lower_plan(plan: Plan, rank: int = 0, device: str = "cuda") -> Lowered:
    """The plan lowered for a rank of its mesh, if it was made from a model; `device`: whose kernels run."""
    if plan.source is None:
        raise PlanError("the plan was read from a file; give it a model with `cm.plan(model, sample, mesh, plan)`.")
    return lower(plan.source, plan, rank, device=device)


class Lowering:
    """Walks the graph once; values are kept by node."""

    def __init__(
        self, captured: Captured, plan: Plan, rank: int, samples: int | None = None, device: str = "cuda"
    ) -> None:
        self._captured, self._plan, self._samples = captured, plan, samples
        self._mesh = dry_mesh(plan.mesh, rank, device).with_settings(StepSettings().for_plan(plan))
        self._runner = DryRunner(self._mesh, cache_of(captured).dry_runs)
        self._weights = DryWeights()
        self._last = any(is_channels_last(p) for p in captured.module.parameters())  # inputs come as the weights are
        self._split_here = {node.name for node in split_nodes(captured.graph)}
        self._stages = {} if plan.pipeline is None else stages_by_node(captured.graph, plan.pipeline)
        self._env: dict[str, Any] = {}
        self._nodes: list[NodeProgram] = []
        self._visits: dict[str, Visit] = {}
        self._arranged: dict[str, Split] = {}
        self._made: dict[Any, str] = {}
        self._shared: dict[str, str] = {}
        self._uses: dict[str, list[tuple[str, Axes]]] = defaultdict(list)

    def run(self) -> Lowered:
        for node in self._captured.module.graph.nodes:
            self._visit(node, self._captured.graph.node(node.name))
        sum_axes, eager = shared_sums(self._uses)
        weights = weight_programs(self._captured.graph.weights, self._mesh, self._weights.cuts, sum_axes)
        nodes = Returning(self._visits, self._mesh).programs(self._nodes)
        program = Program(self._plan.mesh, self._mesh.rank, nodes, weights)
        bytes_inputs, bytes_targets = self._batch_sizes()
        program = replace(program, bytes_inputs=bytes_inputs, bytes_targets=bytes_targets)
        if self._plan.pipeline is None:  # in a pipeline each stage sums its own
            program = with_sums(program, sum_axes, self._mesh, self._plan.reduction)
        return Lowered(
            plan=self._weights.decided_plan(self._plan),
            program=program,
            device=self._mesh.stands_for,
            layouts={node.node: node.outputs for node in self._nodes},
            arranged=self._arranged,
            shared=self._shared,
            cuts=self._weights.cuts,
            sum_axes=sum_axes,
            eager=eager,
            numbers={name: value for name, value in self._env.items() if not _has_tensors(value)},
            dtypes={name: value.dtype for name, value in self._env.items() if isinstance(value, Dry)},
            orders={name: value.order for name, value in self._env.items() if isinstance(value, Dry)},
        )

    def _batch_sizes(self) -> tuple[int, int]:
        """Bytes of this rank's inputs, and of targets that are a class for each sample or voxel of its outputs."""
        rank, made = self._mesh.rank, {node.node: node for node in self._nodes}
        outputs = (made[name] for name in self._captured.graph.nodes[-1].inputs if name in made)
        shapes = [layout.box(rank).shape for node in outputs for layout in node.outputs]
        inputs = (size for node in self._captured.graph.inputs for size in made[node.name].bytes_outputs(rank))
        return sum(inputs), sum(torch.int64.itemsize * math.prod(shape[:1] + shape[2:]) for shape in shapes)

    def _visit(self, node: fx.Node, spec: Node) -> None:
        if node.op == "placeholder":
            self._env[node.name] = self._input(spec)
            self._note(spec, (), DryResult(self._env[node.name], (), (), (), ()))
        elif node.op == "get_attr":
            self._env[node.name] = without_data(_attribute(self._captured.module, str(node.target)))
        elif node.op != "output":
            self._call(node, spec)

    def _input(self, spec: Node) -> Dry:
        """An input comes as its first user wants it."""
        value = spec.outputs[0]
        user = next((n for n in self._captured.graph.consumers(spec.name) if n.name in self._split_here), None)
        whole = Layout.of(self._plan.mesh, self._for_samples(value.shape))
        layout = arranged_layout(whole, self._plan.split(user.layer), False) if user else self._by_samples(whole)
        order = channels_last_order(len(value.shape)) if self._last else ()
        return Dry(layout, getattr(torch, value.dtype), False, order)

    def _for_samples(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape of the captured batch, for the batch that is asked for."""
        if self._samples is None or shape[:1] != self._captured.graph.inputs[0].outputs[0].shape[:1]:
            return shape
        return (self._samples, *shape[1:])

    def _by_samples(self, whole: Layout) -> Layout:
        """Inputs that no split layer takes are cut by samples, as those are that one takes."""
        first = next(split_nodes(self._captured.graph), None)
        axes = self._plan.split(first.layer).sample if first else ()
        return Layout.of(self._plan.mesh, whole.shape, {0: axes}) if whole.cuts and axes else whole

    def _call(self, node: fx.Node, spec: Node) -> None:
        stage = self._stages.get(node.name, 0)
        args = arguments_of(node, lambda n: self._as_seen(n.name, stage))
        self._runner.splits_backward = stage > 0 and self._is_zero_bubble
        if not any(isinstance(leaf, Dry) for leaf in tree_leaves(args)):
            value = _call_of(self._captured.module, node)(*args[0], **args[1])
            self._env[node.name] = tree_map(_learned_apart, value)
            return
        given = _layouts(args)
        try:
            module = self._captured.module.get_submodule(str(node.target)) if node.op == "call_module" else None
            unseen = is_opaque(spec.kind, module)
            split = self._plan.split(spec.layer) if node.name in self._split_here and not unseen else None
            args = self._arrange_once(node, split, args, isinstance(module, LAYERS))
            run = partial(self._opaque, spec, args) if unseen else self._ready(node, spec, module, split, args)
            result = run()
        except (ConvMeshError, ValueError, TypeError, LookupError, RuntimeError) as error:
            raise UnsupportedError(f"layer {spec.layer!r} ({spec.op}), {self._plan.strategy}: {error}") from error
        if result.decided is not None and module is not None:
            self._weights.settle(spec.layer, module, result.decided)
        self._env[node.name] = result.value
        self._visits[node.name] = Visit(result, self._inputs(node, args), partial(self._again, run, stage), stage)
        self._note(spec, given, result)

    def _again(self, run: Run, stage: int, arriving: tuple[Strides | None, ...]) -> DryResult:
        """A node's dry run once more, for gradients that lie in memory otherwise."""
        self._runner.splits_backward = stage > 0 and self._is_zero_bubble
        return run(arriving=arriving)

    def _inputs(self, node: fx.Node, args: Any) -> tuple[tuple[Place | None, Dry], ...]:
        """The tensors that a node is given, and whose they are; None for one that another node had rearranged."""
        names = [leaf.name for leaf in tree_leaves((node.args, dict(node.kwargs))) if isinstance(leaf, fx.Node)]
        places: list[Place | None] = [(n, i) for n in names for i in range(len(_dries(self._env[n])))]
        if node.name in self._shared:
            places[0] = None
        return tuple(zip(places, _dries(args), strict=True))

    def _as_seen(self, name: str, stage: int) -> Any:
        """A value as a stage has it: of what crossed from an earlier one, the gradient always travels back."""
        value = self._env[name]
        if not isinstance(value, Dry) or self._stages.get(name, 0) >= stage:
            return value
        return replace(value, learns=value.dtype.is_floating_point)

    @property
    def _is_zero_bubble(self) -> bool:
        return self._plan.pipeline is not None and self._plan.pipeline.schedule == "zero-bubble"

    def _ready(self, node: fx.Node, spec: Node, module: nn.Module | None, split: Split | None, args: Any) -> Run:
        """A node's dry run, before it is made."""
        if module is not None:
            return self._ready_module(spec, module, split, args)
        call = partial(_after_arranging, _call_of(self._captured.module, node), split, False)
        run, axes = self._runner.run, () if split is None else split.axes
        return partial(run, (node.op, node.target, split), call, args, _weights_in(args), axes=axes)

    def _ready_module(self, spec: Node, module: nn.Module, split: Split | None, args: Any) -> Run:
        cuts_channels, given = isinstance(module, LAYERS), _first(args).layout
        arranged = given if split is None else arranged_layout(given, split, cuts_channels)
        weights = self._weights.of(spec.layer, module, split, arranged)
        call = partial(_after_arranging, partial(_with_weights, module, weights), split, cuts_channels)
        key = _key(module, weights)
        full_key = None if key is None else (key, split, self._weights.decided(spec.layer))
        axes = () if split is None else split.axes
        return partial(self._runner.run, full_key, call, args, list(weights.values()), axes=axes)

    def _arrange_once(self, node: fx.Node, split: Split | None, args: Any, cuts_channels: bool) -> Any:
        """Note the change of layout that a node's input needs; one that an earlier node made serves this one too."""
        given = _first(args)
        layout = given.layout if split is None else arranged_layout(given.layout, split, cuts_channels)
        if split is None or layout == given.layout:
            return args
        source = node.args[0] if node.args else None
        made = (source, self._stages.get(node.name, 0), layout)
        if made in self._made and isinstance(source, fx.Node):
            self._shared[node.name] = self._made[made]
            return (replace(given, layout=layout), *args[0][1:]), args[1]
        self._made[made] = node.name
        self._arranged[node.name] = split
        return args

    def _opaque(self, spec: Node, args: Any, arriving: tuple[Strides | None, ...] = ()) -> DryResult:
        """Its samples stay cut; what it computes is not known, nor what a gradient's order in memory changes."""
        del arriving
        inputs = _dries(args)
        lead = inputs[0].layout
        by_samples = lead.with_whole([dim for dim in range(1, len(lead.cuts)) if lead.is_cut(dim)])
        learns = any(x.learns for x in inputs) or any(weight.learns for weight in spec.weights)
        shapes_here = [self._for_samples(value.shape) for value in spec.outputs]
        made = [
            Dry(opaque_layout(by_samples, shape, spec.layer), getattr(torch, value.dtype), learns)
            for shape, value in zip(shapes_here, spec.outputs, strict=True)
        ]
        shapes = tuple(tuple(x.layout.box(self._mesh.rank).shape) for x in made)
        work = Work(spec.op, (), shapes, spec.outputs[0].dtype if spec.outputs else "", 0, 0)
        # What its inputs' change of layout costs, found with the operator that does nothing else.
        moved = [self._runner.run("by_samples", by_samples_only, ((x,), {})) for x in inputs]
        forward = (*(step for run in moved for step in run.forward), work)
        backward = (work, *(step for run in moved for step in run.backward))
        found = tuple(x.gradient(self._mesh, None).stride() if x.learns else None for x in inputs)
        value = made[0] if len(made) == 1 else tuple(made)
        return DryResult(value, forward, backward, (), (by_samples.axes,), gradients=found)

    def _note(self, spec: Node, given: tuple[Layout, ...], result: DryResult) -> None:
        made = _dries(result.value)
        self._nodes.append(
            NodeProgram(
                node=spec.name,
                layer=spec.layer,
                inputs=given,
                outputs=tuple(x.layout for x in made),
                dtypes=tuple(dtype_name(x.dtype) for x in made),
                forward=result.forward,
                backward=result.backward,
                saved=result.saved,
                sources=tuple(name for name in spec.inputs if isinstance(self._env.get(name), Dry)),
                held=result.held,
                block=self._plan.recomputed(spec.layer) or "",
                weights=tuple(weight.name for weight in spec.weights if weight.learns),
                weight_steps=result.weight_steps,
                kind=node_kind(spec.op),
            )
        )
        axes = tuple(dict.fromkeys(name for axes in result.sum_axes for name in axes))
        in_mesh_order = tuple(name for name in self._plan.mesh.axes if name in axes)
        for weight in spec.weights:
            if weight.learns:
                self._uses[weight.name].append((spec.name, in_mesh_order))


def node_kind(op: str) -> str:
    """What a node calls, whatever its number of dims: `conv` for Conv2d and conv3d."""
    name = op.lower()
    return name[:-2] if name[-2:] in ("1d", "2d", "3d") else name


def _after_arranging(
    call: Callable[..., Any], split: Split | None, cuts_channels: bool, *args: Any, **kwargs: Any
) -> Any:
    if split is not None:
        args = (arrange(args[0], split, cuts_channels), *args[1:])
    return call(*args, **kwargs)


def _with_weights(module: nn.Module, weights: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    return torch.func.functional_call(module, weights, args, kwargs)


def _key(module: nn.Module, weights: dict[str, torch.Tensor]) -> Any:
    """What tells calls of modules apart; None for a module whose forward may depend on anything."""
    if not type(module).__module__.startswith("torch.nn."):
        return None
    shapes = tuple((name, w.shape, w.stride(), w.dtype, w.requires_grad, type(w)) for name, w in weights.items())
    return type(module), module.extra_repr(), module.training, shapes


def _call_of(root: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    if node.op == "call_method":
        return partial(_call_method, str(node.target))
    assert callable(node.target)
    return node.target


def _call_method(name: str, receiver: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(receiver, name)(*args, **kwargs)


def _attribute(root: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)


def _first(args: Any) -> Dry:
    return _dries(args)[0]


def _dries(value: Any) -> list[Dry]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Dry)]


def _layouts(args: Any) -> tuple[Layout, ...]:
    return tuple(leaf.layout for leaf in _dries(args))


def _learned_apart(value: Any) -> Any:
    """What a layer makes of constants alone: every rank has all of it, and its backward is the layer's own affair."""
    is_learned = isinstance(value, torch.Tensor) and value.requires_grad
    return without_data(value) if is_learned else value


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, (Dry, torch.Tensor)) for leaf in tree_leaves(value))


def _weights_in(args: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
