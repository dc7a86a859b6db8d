"""The split network: an ordinary module whose parameters have the model's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.optim import Optimizer

from convmesh.dist import OpenMesh
from convmesh.errors import ShapeError, UnsupportedError
from convmesh.gradients.clip import clip_held_
from convmesh.gradients.reducers import reducer_for
from convmesh.gradients.reduction import GradientReducer
from convmesh.gradients.scattered import ShardedReducer
from convmesh.gradients.sharded_optimizer import Params, ShardedOptimizer
from convmesh.graph import Captured
from convmesh.layout import Layout, Mesh
from convmesh.lowering.loss_node import target_layout
from convmesh.lowering.lowered import Lowered
from convmesh.ops.core.sharded import Sharded
from convmesh.ops.elementwise.dropout import manual_seed
from convmesh.ops.loss.labels import collecting_labels
from convmesh.plans import Plan, Program
from convmesh.private_torch import tree_leaves, tree_map
from convmesh.private_torch.module_tables import parameters_of, parts_of, share_state
from convmesh.runtime.direct_engine import LossCheck
from convmesh.runtime.full_state import (
    State,
    check_names,
    copy_buffers_along,
    is_materialised,
    load_whole,
    materialise,
    named_tensors,
    reset,
    whole,
)  # fmt: skip
from convmesh.runtime.late_copy import settle_copies
from convmesh.runtime.pipeline.stage_weights import StageWeights
from convmesh.runtime.placing import cut, for_batch, marked, on_layout
from convmesh.runtime.read_modes import ReadModes
from convmesh.runtime.relowering import end_layouts, relowered


class Engine(Protocol):
    """Runs a step."""

    loss: Any

    @property
    def networks(self) -> list[fx.GraphModule]:
        """The graphs that this rank runs: one, or those of its stages."""

    def outputs(self, inputs: list[Sharded]) -> Any: ...

    def step(self, inputs: list[Sharded], targets: Any) -> tuple[torch.Tensor, Any]: ...

    def rebind(self, owner: nn.Module) -> None:
        """Use the tensors that `owner` has now."""

    def layout_of(self, planned: Layout) -> Layout:
        """The layout of a whole batch's tensor, from the lowered one."""


@dataclass
class Running:
    """All that a split network holds except its weights; in one attribute, so that it hides no name of the model."""

    lowered: Lowered
    mesh: OpenMesh
    engine: Engine
    reducer: GradientReducer | None
    """None while the weights have no memory."""
    inputs: list[Layout]
    outputs: Any
    check: LossCheck
    stages: StageWeights | None
    """In a pipeline: the ranks that hold each stage's weights."""
    network: Captured
    """The network without weights, to lower the plan again."""
    reads_weights: bool
    """Whether the network reads weights directly, not through a layer, which waits for its own updates."""
    modes: ReadModes | None = None
    shapes_seen: bool = False
    last_mesh: Mesh | None = None
    """The mesh by whose shares the last batch was cut: batches under way keep their cuts."""
    replicas_differ: bool = False
    """Whether running statistics differ along `data` since the last training step."""


class ParallelNet(nn.Module):
    """Maps this rank's input shards to its output shards, or with targets to the global loss. See `parallelize`."""

    def __init__(self, model: nn.Module, running: Running) -> None:
        super().__init__()
        self._running = running
        self.training = model.training
        share_state(self, model)
        running.modes = ReadModes(running.engine.networks, self)
        self.register_state_dict_pre_hook(_wait_for_weights)

    @property
    def plan(self) -> Plan:
        """The plan, with every algorithm named."""
        return self._running.lowered.plan

    @property
    def program(self) -> Program:
        """This rank's computations and transfers in a step."""
        return self._running.lowered.program

    @property
    def mesh(self) -> OpenMesh:
        return self._running.mesh

    def forward(self, *args: Any) -> Any:
        """`net(x)`: this rank's output shard. `net(x, target)`: the global loss, the same on every rank."""
        run, reducer = self._running, self._reducer  # which a network without weights does not have
        inputs, targets = self._placed(args)
        self._settle_modes()
        if run.reads_weights:
            reducer.wait()
        if targets is None:
            return tree_map(lambda y: marked(y) if isinstance(y, Sharded) else y, run.engine.outputs(inputs))
        with reducer.aside(), collecting_labels() as labels:
            loss, outputs = run.engine.step(inputs, targets)
        run.check.see(loss, outputs, labels)
        return loss

    def output_and_target(self, *args: Any) -> tuple[Any, Any]:
        """The output for this rank's shards `x, target`, and the target, as `Sharded`: for losses and metrics.

        Torch functions on them are those of the whole batch. In a pipeline they have no gradient.
        """
        reducer = self._reducer
        inputs, targets = self._placed(args)
        self._settle_modes()
        if self._running.reads_weights:
            reducer.wait()
        return self._running.engine.outputs(inputs), targets

    def _settle_modes(self) -> None:
        """Follow `train()` and `eval()`: in `eval()`, replicas' own statistics become the first one's, as in DDP."""
        run = self._running
        if run.modes is not None:
            run.modes.follow()
        if self.training:
            run.replicas_differ = run.lowered.plan.batchnorm == "replica"
        elif run.replicas_differ:
            copy_buffers_along(self, run.mesh, "data")
            run.replicas_differ = False

    def _placed(self, args: tuple[Any, ...]) -> tuple[list[Sharded], Any]:
        """Inputs and targets with their layouts; in the first step all ranks check theirs together."""
        problem: str | None = None
        inputs: list[Sharded] = []
        targets: Any = None
        try:
            inputs, targets = self._with_layouts(args)
        except ShapeError as error:
            if self._running.shapes_seen:
                raise
            problem = str(error)
        if not self._running.shapes_seen:
            self._running.mesh.agree("`net`", f"{len(args)} arguments", problem)
            self._running.shapes_seen = True
        if inputs:
            self._running.last_mesh = inputs[0].layout.mesh
        return inputs, targets

    def _with_layouts(self, args: tuple[Any, ...]) -> tuple[list[Sharded], Any]:
        run = self._running
        count = len(run.inputs)
        wants_target = run.engine.loss is not None
        if len(args) not in ((count, count + 1) if wants_target else (count,)):
            expected = f"{count} input(s)" + (" and a target" if wants_target else "; it has no loss")
            raise ShapeError(f"`net` was called with {len(args)} arguments; it takes {expected}.")
        pairs = zip(args[:count], run.inputs, strict=True)
        inputs = [on_layout(x, at, run.mesh, f"input {i}") for i, (x, at) in enumerate(pairs)]
        return inputs, self._target(args[count], inputs) if len(args) > count else None

    def _target(self, given: Any, inputs: list[Sharded]) -> Any:
        if not isinstance(given, (torch.Tensor, Sharded)):
            return tree_map(lambda t: self._target(t, inputs) if isinstance(t, torch.Tensor) else t, given)
        output = self._output_layout(inputs[0].shape[0] if inputs and inputs[0].dim() else None)
        return on_layout(given, _planned_target(output, given, self.mesh.rank), self.mesh, "the target")

    def _output_layout(self, samples: int | None = None) -> Layout | None:
        """The layout of the network's first output, for a batch of `samples`."""
        layouts = [leaf for leaf in tree_leaves(self._running.outputs) if isinstance(leaf, Layout)]
        if not layouts or samples is None:
            return layouts[0] if layouts else None
        first, planned = layouts[0], self._running.inputs[0].shape[:1]
        return first.with_shape((samples, *first.shape[1:])) if first.shape[:1] == planned != () else first

    def input_layouts(self, samples: int | None = None) -> tuple[Layout, ...]:
        """The layout of every input, for a batch of `samples` (default: the plan's)."""
        planned = self._running.inputs
        return tuple(at if samples is None else at.with_shape((samples, *at.shape[1:])) for at in planned)

    def target_layout(self, shape: Sequence[int]) -> Layout:
        """The layout of a target of this global shape: it is cut where the output is."""
        output = self._output_layout(shape[0] if shape else None)
        assert output is not None
        return target_layout(output, tuple(shape))

    def shard_input(self, *tensors: torch.Tensor) -> Any:
        """This rank's shard of each global input tensor; the batch may differ in size from the plan's."""
        run = self._running
        if len(tensors) != len(run.inputs):
            raise ShapeError(f"`shard_input` was given {len(tensors)} tensors; the network takes {len(run.inputs)}.")
        pairs = zip(tensors, run.inputs, strict=True)
        shards = [cut(x, for_batch(at, tuple(x.shape), "the input"), run.mesh) for x, at in pairs]
        return shards[0] if len(shards) == 1 else tuple(shards)

    def shard_target(self, target: Any) -> Any:
        """This rank's shard of a global target, cut where the output is."""
        if not isinstance(target, torch.Tensor):
            return tree_map(lambda t: self.shard_target(t) if isinstance(t, torch.Tensor) else t, target)
        return cut(target, self.target_layout(target.shape), self.mesh)

    def gather_output(self, output: Any) -> Any:
        """The global output, on every rank, from every rank's shard."""
        if not isinstance(output, (torch.Tensor, Sharded)):
            return tree_map(lambda y: self.gather_output(y) if isinstance(y, torch.Tensor) else y, output)
        return on_layout(output, self._output_layout(), self.mesh, "the output").gather()

    def set_shares(self, **shares: Sequence[int]) -> None:
        """Change the shares of samples and space: `net.set_shares(data=(3, 1))`. Call it on every rank, between steps.

        The plan is lowered for the new shares. Weights, optimisers and results do not change; shards that were cut
        before may still be trained on.
        """
        run = self._running
        mesh = run.mesh.mesh.with_shares(**shares)
        run.lowered = relowered(run.network, run.lowered, run.mesh, mesh)
        run.inputs, run.outputs = end_layouts(run.network, run.lowered, run.engine.layout_of)
        run.mesh = run.mesh.cut_as(mesh)

    @property
    def dealt_mesh(self) -> Mesh:
        """The mesh by whose shares the last batch was cut."""
        return self._running.last_mesh or self.mesh.mesh

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients over several backward passes; the next one outside sums them over ranks once."""
        return self._reducer.no_sync()

    def full_state_dict(self) -> State:
        """The single-device model's `state_dict`, on every rank."""
        self._reducer.wait()
        if self._running.replicas_differ:
            copy_buffers_along(self, self.mesh, "data")
        mine = {name: whole(tensor, self.mesh) for name, tensor in named_tensors(self)}
        stages = self._running.stages
        return mine if stages is None else stages.everywhere(mine, stages.wanted)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a single-device `state_dict`; names and shapes are checked before anything changes."""
        stages = self._running.stages
        check_names(state, dict(named_tensors(self)) if stages is None else stages.wanted)
        self._give_memory()
        self._reducer.wait()
        settle_copies()
        for name, tensor in named_tensors(self):
            load_whole(tensor, state[name], self.mesh, self._running.lowered.cuts.get(name, {}))

    def reset_parameters(self, seed: int = 0) -> None:
        """Draw initial weights as the layers' own `reset_parameters` do; the mesh and the plan do not change them."""
        self._give_memory()
        self._reducer.wait()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            stages = self._running.stages
            reset(self, self.mesh, self._running.lowered.cuts, self if stages is None else stages.template)

    def manual_seed(self, seed: int) -> None:
        """Restart dropout's masks, e.g. for each run; pass the same seed on every rank."""
        manual_seed(self.mesh, seed)

    def _give_memory(self) -> None:
        """Allocate this rank's shards of a network that was made on the meta device."""
        run = self._running
        if not is_materialised(self):
            materialise(self, run.mesh.device)
            run.reducer = reducer_for(self, run.lowered.sum_axes, run.mesh, run.lowered.plan.summing)
            run.engine.rebind(self)

    @property
    def _reducer(self) -> GradientReducer:
        if self._running.reducer is None:
            raise UnsupportedError(
                "the network was made on the meta device and has no weights yet; call "
                "`net.load_full_state_dict(state)` or `net.reset_parameters(seed)` first."
            )
        return self._running.reducer

    def optimizer(self, kind: type[Optimizer], params: Params | None = None, **options: Any) -> Optimizer:
        """An optimiser for this rank's weights, under any reduction: `net.optimizer(AdamW, lr=1e-3)`.

        `params` are some of the net's parameters, or groups of them with their own options, as torch takes them.
        """
        chosen: list[Any] = list(self.parameters() if params is None else params)
        if isinstance(self._reducer, ShardedReducer):
            return ShardedOptimizer(chosen, kind, **options)
        return kind(chosen, **options)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm over the whole network is at most `max_norm`; return the norm before.

        Call it on every rank. Each value counts once, wherever it is held.
        """
        held = [pair for parameter in self.parameters() for pair in self._reducer.held(parameter)]
        return clip_held_([(self.mesh, held)], max_norm, norm_type, error_if_nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of a sharded optimiser's parts."""
        if set_to_none:
            for parameter in (p for part in parts_of(self) for p in parameters_of(part).values()):
                if parameter is not None:
                    parameter.grad = None
        else:
            super().zero_grad(set_to_none=False)
        reducer = self._running.reducer
        for part in () if reducer is None else reducer.apart:
            if set_to_none or part.grad is None:
                part.grad = None
            else:
                part.grad.zero_()

    def full_gradients(self) -> State:
        """The single-device gradients of all parameters that have one, on every rank."""
        reducer = self._running.reducer
        gathered = {} if reducer is None else reducer.gather_gradients()
        each = ((name, gathered.get(p, p.grad)) for name, p in self.named_parameters())
        mine = {name: whole(gradient, self.mesh) for name, gradient in each if gradient is not None}
        stages = self._running.stages
        return mine if stages is None else stages.everywhere(mine, dict(stages.template.named_parameters()))


def _wait_for_weights(net: ParallelNet, *options: Any) -> None:
    """Before `net.state_dict()`: wait for updates under way."""
    del options
    if net._running.reducer is not None:
        net._running.reducer.wait()


def _planned_target(output: Layout | None, given: Any, rank: int) -> Layout | None:
    """The layout of a plain target, from its shape: that of the output's shard, with or without channels."""
    if output is None or isinstance(given, Sharded):
        return None
    shape, full = tuple(given.shape), output.shape
    candidates = [target_layout(output, full), target_layout(output, full[:1] + full[2:])]
    if full and len(shape) <= 1:
        candidates.append(target_layout(output, full[:1]))
    return next((at for at in candidates if at.box(rank).shape == shape), candidates[0])
