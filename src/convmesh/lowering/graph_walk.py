"""Walking a network's graph: every node is run dry on one rank of a plan's mesh, with the layouts that its inputs have.

The operators that run are the runtime's own, on tensors without data, so a program cannot differ from what is executed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from convmesh.dist import StepSettings, dry_mesh
from convmesh.errors import ConvMeshError, UnsupportedError
from convmesh.graph import Captured, Node
from convmesh.graph.tracing.node_meta import arguments_of
from convmesh.kernels.memory_format import channels_last_order
from convmesh.layout import Layout
from convmesh.lowering.arrange import Arranged, Role, arranged_layout, input_layout, input_user, role_of
from convmesh.lowering.assembly import Assembly
from convmesh.lowering.dense_functions import tensor_at, weights_of_call
from convmesh.lowering.dry_call import DryCall
from convmesh.lowering.dry_run import DryRunner
from convmesh.lowering.dry_values import Dry, DryResult, Strides, dries_in
from convmesh.lowering.feature_blocks import feature_blocks
from convmesh.lowering.gradient_strides import Place, Returning, Visit
from convmesh.lowering.joint_inputs import joint_readers
from convmesh.lowering.lowered import Lowered
from convmesh.lowering.lowering_cache import LoweringCache, cache_of
from convmesh.lowering.node_calls import FunctionCall, ModuleCall, call_of
from convmesh.lowering.opaque import is_opaque
from convmesh.lowering.opaque_nodes import run_unseen
from convmesh.lowering.stage_program import stages_by_node
from convmesh.lowering.weight_cuts import DecidedCuts, without_data
from convmesh.plans import Plan, Split, split_nodes
from convmesh.private_torch import tree_leaves, tree_map
from convmesh.private_torch.module_tables import call_with, named_tensors, part_at

Run = Callable[..., DryResult]


class Lowering:
    """Walks the graph once; values are kept by node."""

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        rank: int,
        samples: int | None = None,
        device: str = "cuda",
        cache: LoweringCache | None = None,
        eager: frozenset[str] = frozenset(),
    ) -> None:
        self._captured, self._plan, self._samples, self._eager = captured, plan, samples, eager
        self._mesh = dry_mesh(plan.mesh, rank, device).with_settings(StepSettings().for_plan(plan))
        self._cache = cache or cache_of(captured)
        self._runner = DryRunner(self._mesh, self._cache.dry_runs)
        self._summing = DryRunner(self._mesh.with_settings(self._mesh.settings.summing_weights()))
        self._weights = DecidedCuts()
        self._split_here = {node.name for node in split_nodes(captured.graph)}
        self._stages = {} if plan.pipeline is None else stages_by_node(captured.graph, plan.pipeline)
        self._joint = joint_readers(captured.graph, plan, self._stages)
        self._env: dict[str, Any] = {}
        self._assembly = Assembly(captured, plan, self._mesh, self._weights)
        self._visits: dict[str, Visit] = {}
        self._arranged: dict[str, Arranged] = {}
        self._made: dict[Any, str] = {}
        self._shared: dict[str, str] = {}

    def run(self) -> Lowered:
        for node in self._captured.module.graph.nodes:
            self._visit(node, self._captured.graph.node(node.name))
        late = self._assembly.mixed - self._assembly.eager - self._eager
        if late:  # their backward sends more than was recorded
            return self._with_eager(late).run()
        nodes = Returning(self._visits, self._mesh).programs(self._assembly.nodes)
        self._visits = {}  # they refer to this walk, which would keep it alive
        return self._assembly.lowered(nodes, self._env, self._arranged, self._shared)

    def _with_eager(self, names: frozenset[str]) -> Lowering:
        """The same walk, in which these nodes sum the gradients of their weights themselves."""
        at, eager = self._mesh, self._eager | names
        return Lowering(self._captured, self._plan, at.rank, self._samples, at.stands_for, self._cache, eager)

    def _visit(self, node: fx.Node, spec: Node) -> None:
        if node.op == "placeholder":
            self._env[node.name] = self._input(spec)
            self._assembly.note(spec, (), DryResult(self._env[node.name], (), (), (), ()), self._env)
        elif node.op == "get_attr":
            self._env[node.name] = without_data(tensor_at(self._captured.module, str(node.target)))
        elif node.op != "output":
            self._call(node, spec)

    def _input(self, spec: Node) -> Dry:
        """An input comes as its first user wants it; with no layer to ask, the data axis cuts it."""
        value, graph = spec.outputs[0], self._captured.graph
        whole = Layout.of(self._plan.mesh, self._for_samples(value.shape))
        if user := input_user(graph, spec.name):
            layout = input_layout(whole, spec.name, user, self._plan.split(user.layer))
        else:
            layout = Layout.of(whole.mesh, whole.shape, {0: "data"}) if whole.cuts else whole
        order = channels_last_order(len(value.shape)) if self._cache.takes_channels_last else ()
        return Dry(layout, getattr(torch, value.dtype), False, order)

    def _for_samples(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape from the captured batch, for the requested number of samples."""
        if self._samples is None or shape[:1] != self._captured.graph.inputs[0].outputs[0].shape[:1]:
            return shape
        return (self._samples, *shape[1:])

    def _call(self, node: fx.Node, spec: Node) -> None:
        stage = self._stages.get(node.name, 0)
        args = arguments_of(node, lambda n: self._as_seen(n.name, stage))
        self._runner.splits_backward = stage > 0 and self._is_zero_bubble
        dries = dries_in(args)
        if not dries:
            args = tree_map(_computed, args)
            value = self._made_apart(node, args)
            self._assembly.computed |= {weight.name for weight in spec.weights if weight.learns}
            self._env[node.name] = tree_map(without_data, value)  # a factory that names no device makes data
            return
        given = tuple([x.layout for x in dries])
        try:
            module = self._module_of(node)
            unseen = is_opaque(spec.kind, module)
            is_split = node.name in self._split_here and not unseen and bool(args[0]) and isinstance(args[0][0], Dry)
            split = self._plan.split(spec.layer) if is_split else None
            if module is not None and node.op != "call_module":  # the module stands for a function on weights
                args = (args[0][:1], {})
            role: Role = "joint" if node.name in self._joint else role_of(module)
            if split is not None and role == "joint":
                split = replace(split, algorithm="y")
            args = self._arrange_once(node, split, args, role)
            run, result = self._run(node, spec, module, split if not unseen else None, args, unseen, role)
        except (ConvMeshError, ValueError, TypeError, LookupError, RuntimeError) as error:
            raise UnsupportedError(f"layer {spec.layer!r} ({spec.op}), {self._plan.strategy}: {error}") from error
        if result.decided is not None and module is not None:
            self._weights.settle(spec.layer, module, result.decided, weights_of_call(node))
        self._env[node.name] = result.value
        self._note_set(node)
        self._visits[node.name] = Visit(result, self._inputs(node, args), partial(self._again, run, stage), stage)
        self._assembly.note(spec, given, result, self._env)

    def _module_of(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls, or that stands for its call of a function on the model's weights."""
        if node.op == "call_module":
            return part_at(self._captured.module, str(node.target))
        if node.name not in self._split_here:
            return None
        return self._cache.stand_in(node, self._captured.module)

    def _made_apart(self, node: fx.Node, args: Any) -> Any:
        """The result of a node on constants; if those have no data, neither do its weights."""
        has_data = not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(args))
        if node.op != "call_module" or has_data:
            return call_of(self._captured.module, node)(*args[0], **args[1])
        module = part_at(self._captured.module, str(node.target))
        weights = {name: without_data(tensor) for name, tensor in named_tensors(module)}
        return call_with(module, weights, args[0], args[1])

    def _run(
        self,
        node: fx.Node,
        spec: Node,
        module: nn.Module | None,
        split: Split | None,
        args: Any,
        unseen: bool,
        role: Role,
    ) -> tuple[Run, DryResult]:
        """A node's dry run.

        The node sums the gradients of its weights itself if they serve work that is cut by different axes, or are
        computed from the model's parameters: the reducer knows only the parameters themselves.
        """
        if unseen and module is not None:
            run: Run = self._unseen(spec, args, module)
            return run, run()
        call = self._dry_call(node, spec, module, split, args, role)
        run = partial(self._runner.run, call, args)
        result = run()
        is_eager = node.name in self._eager or len({*result.sum_axes}) > 1
        if is_eager or (any(result.sum_axes) and self._takes_computed(node)):
            self._summing.splits_backward = self._runner.splits_backward
            self._assembly.eager.add(node.name)
            run = partial(self._summing.run, call, args)
            result = run()
        return run, result

    def _takes_computed(self, node: fx.Node) -> bool:
        computed = (self._env[n.name] for n in node.all_input_nodes if n.op != "get_attr")
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in computed)

    def _note_set(self, node: fx.Node) -> None:
        """After `x[...] = value`, x learns if the value does."""
        if node.target is not operator.setitem or not isinstance(node.args[0], fx.Node):
            return
        learns = any(self._env[n.name].learns for n in node.all_input_nodes if isinstance(self._env[n.name], Dry))
        target = self._env[node.args[0].name]
        if isinstance(target, Dry):
            self._env[node.args[0].name] = replace(target, learns=learns)

    def _again(self, run: Run, stage: int, arriving: tuple[Strides | None, ...]) -> DryResult:
        """Repeats a node's dry run for gradients with other strides."""
        self._runner.splits_backward = stage > 0 and self._is_zero_bubble
        return run(arriving=arriving)

    def _inputs(self, node: fx.Node, args: Any) -> tuple[tuple[Place | None, Dry], ...]:
        """A node's input tensors and where they come from; None for one that another node had rearranged."""
        names = self._cache.argument_names(node)
        places: list[Place | None] = [(n, i) for n in names for i in range(len(dries_in(self._env[n])))]
        if node.name in self._shared:
            places[0] = None
        return tuple(zip(places, dries_in(args), strict=True))

    def _as_seen(self, name: str, stage: int) -> Any:
        """A value as a stage sees it: if it crossed from an earlier one, its gradient always travels back."""
        value = self._env[name]
        if not isinstance(value, Dry) or self._stages.get(name, 0) >= stage:
            return value
        return replace(value, learns=value.dtype.is_floating_point)

    @property
    def _is_zero_bubble(self) -> bool:
        return self._plan.pipeline is not None and self._plan.pipeline.schedule == "zero-bubble"

    def _dry_call(
        self, node: fx.Node, spec: Node, module: nn.Module | None, split: Split | None, args: Any, role: Role
    ) -> DryCall:
        """A node's call, before it is made."""
        given = _first(args).layout
        arranged = given if split is None else arranged_layout(given, split, role)
        moves = arranged != given
        if module is None:
            tensors = tuple(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            return FunctionCall(node.op, node.target, split, moves, tensors)
        cuts_norm = self._weights.note_norm(spec.layer, module, arranged)
        key = self._cache.module_key(spec.layer, module)
        decided, blocks = self._weights.decided(spec.layer), self._blocks(spec, split)
        return ModuleCall(spec.layer, module, key, split, moves, cuts_norm, decided, blocks, role)

    def _blocks(self, spec: Node, split: Split | None) -> int:
        """The number of blocks in which a layer's features are read, within its own stage."""
        if split is None or not split.channel or not spec.channels_last:
            return 1
        stage = self._stages.get(spec.name, 0)
        if any(self._stages.get(node.name, 0) != stage for node in self._captured.graph.consumers(spec.name)):
            return 1
        return feature_blocks(self._captured.graph, spec, self._plan.mesh.extent(split.channel))

    def _unseen(self, spec: Node, args: Any, module: nn.Module) -> Run:
        shapes = [self._for_samples(value.shape) for value in spec.outputs]
        return partial(run_unseen, self._runner, spec, shapes, dries_in(args), module)

    def _arrange_once(self, node: fx.Node, split: Split | None, args: Any, role: Role) -> Any:
        """Note the change of layout that a node's input needs; one that an earlier node made serves this one too."""
        given = _first(args)
        layout = given.layout if split is None else arranged_layout(given.layout, split, role)
        if split is None or layout == given.layout:
            return args
        source = node.args[0] if node.args else None
        made = (source, self._stages.get(node.name, 0), layout)
        if made in self._made and isinstance(source, fx.Node):
            self._shared[node.name] = self._made[made]
            return (given.copied_in(layout), *args[0][1:]), args[1]
        self._made[made] = node.name
        self._arranged[node.name] = Arranged(split, role)
        return args


def _first(args: Any) -> Dry:
    return args[0][0] if args[0] and isinstance(args[0][0], Dry) else dries_in(args)[0]


def _computed(value: Any) -> Any:
    """A learning leaf as the call sees it, a result: unlike a leaf, it may be changed in place."""
    return value.clone() if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad else value
