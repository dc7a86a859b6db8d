"""Cutting a model's channels and filters: which layer by which algorithm, decided before anything runs.

A dry run of the model on one rank of the mesh meets every layer with its input's true layout. Each layer takes the
algorithm whose transfers, forward and backward, move the fewest elements. Where only channel-local operators lie
between two layers with a wide middle, that makes the pair y-then-x: it gathers once and sum-scatters once, and nothing
is moved in the middle.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from convmesh.dist import OpenMesh, dry_mesh
from convmesh.dist.cut_weights import cut_weight
from convmesh.errors import UnsupportedError
from convmesh.layout import Layout, Mesh
from convmesh.layout.channels import ChannelSplit, Volumes, candidates, groups_divide, largest_split, volumes
from convmesh.layout.mesh import CHANNEL_AXES
from convmesh.ops.channels.channel_layers import GATHERS_AGAIN, transposed_filter_dim
from convmesh.ops.channels.undecided_weight import PlannedWeight, Plans
from convmesh.ops.core.sharded import CutOf, Sharded, shard

Choice = Literal["auto", "x", "y", "w", "whole"]
Algorithms = Choice | Mapping[str, Choice]
Sample = Sequence[int] | torch.Tensor

PlansOf = Callable[[ChannelSplit], Plans]

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PER_CHANNEL = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.GroupNorm,
)  # fmt: skip


@dataclass(frozen=True)
class LayerCut:
    """One layer: how its weight is cut, what one rank sends, and what keeping its gathered input would cost."""

    split: ChannelSplit
    moved: Volumes
    gathered_extra: int
    """Elements that a kept gathered input has beyond the rank's own shard."""
    gathers_again: bool = False


@dataclass
class ChannelPlan:
    """For every layer its cut; for every norm the axes that cut its channels."""

    layers: dict[str, LayerCut] = field(default_factory=dict)
    per_channel: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table: layer, algorithm, elements that a rank sends in a step, whether the input is gathered again."""
        rows = [
            f"{name or '(model)':24} {cut.split.algorithm:>2} {cut.moved.total:>12}" + " again" * cut.gathers_again
            for name, cut in self.layers.items()
        ]
        return "\n".join(rows)

    def limit_gathered(self, most: int) -> None:
        """Let layers gather again until no more than `most` extra elements are kept, those first that save the most
        memory for each element they send once more."""
        by_worth = sorted(self.layers, key=lambda name: -_worth(self.layers[name]))
        kept = sum(cut.gathered_extra for cut in self.layers.values())
        for name in by_worth:
            if kept <= most or not self.layers[name].gathered_extra:
                return
            kept -= self.layers[name].gathered_extra
            self.layers[name] = replace(self.layers[name], gathers_again=True)


def _worth(cut: LayerCut) -> float:
    return cut.gathered_extra / max(1, cut.moved.gather_input)


def plan_channels(
    model: nn.Module,
    sample: Sample,
    mesh: Mesh,
    cut: CutOf | None = None,
    algorithm: Algorithms = "auto",
    most_gathered: int | None = None,
) -> ChannelPlan:
    """Decide the cut of every layer for inputs of a global shape, cut as `cut` says; needs no processes.

    `sample` is that shape, or a tensor of it, whose type and need for a gradient count too. `algorithm` is one choice
    for all layers, or maps patterns of layer names to choices; "whole" leaves a layer uncut. `most_gathered` bounds the
    elements of gathered inputs that a rank keeps for backward: 0 keeps none, None all.
    """
    plan = ChannelPlan()
    if {*CHANNEL_AXES} & {*mesh.axes}:
        x = shard(_without_data(sample, model), dry_mesh(mesh), cut or {})
        x.local.requires_grad_(isinstance(sample, torch.Tensor) and sample.requires_grad)
        _dry_run(model, x, plan, algorithm)
    if most_gathered is not None:
        plan.limit_gathered(most_gathered)
    return plan


def _without_data(sample: Sample, model: nn.Module) -> torch.Tensor:
    if isinstance(sample, torch.Tensor):
        return torch.empty(sample.shape, dtype=sample.dtype, device="meta")
    dtype = next((p.dtype for p in model.parameters()), None)
    return torch.empty(tuple(sample), dtype=dtype, device="meta")


def _dry_run(model: nn.Module, x: Sharded, plan: ChannelPlan, algorithm: Algorithms) -> None:
    """Run the model without data: layers decide on their cuts, and norms note how their channels come."""
    names = {id(module): name for name, module in model.named_modules()}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(args[0], Sharded) and args[0].layout.is_cut(1):
            plan.per_channel[names[id(module)]] = args[0].layout.cuts[1].axes

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, PER_CHANNEL)]
    try:
        torch.func.functional_call(model, _undecided(model, plan, algorithm, x.mesh.mesh), (x,))
    finally:
        for hook in hooks:
            hook.remove()


def _undecided(model: nn.Module, plan: ChannelPlan, algorithm: Algorithms, mesh: Mesh) -> dict[str, torch.Tensor]:
    """The model's tensors without data; weights of layers that may be cut decide when they meet their input."""
    state = (*model.named_parameters(), *model.named_buffers())
    tensors: dict[str, torch.Tensor] = {name: torch.empty_like(t, device="meta") for name, t in state}
    for name, module in model.named_modules():
        if isinstance(module, LAYERS) and (choice := _choice(name, algorithm)) != "whole":
            key = f"{name}.weight" if name else "weight"
            tensors[key] = PlannedWeight.of(module.weight, _decider(plan, name, choice, mesh))
    return tensors


def cut_channels(
    model: nn.Module,
    sample: Sample,
    mesh: OpenMesh,
    cut: CutOf | None = None,
    algorithm: Algorithms = "auto",
    most_gathered: int | None = None,
) -> ChannelPlan:
    """Replace the weights of `model` by this rank's shards (DTensor parameters), as `plan_channels` decides."""
    plan = plan_channels(model, sample, mesh.mesh, cut, algorithm, most_gathered)
    mesh.agree("`cut_channels`", str(plan))
    for name, layer in plan.layers.items():
        module = model.get_submodule(name)
        for tensor, cuts in weight_cuts(module, layer.split).items():
            replace_tensor(module, tensor, mesh, cuts)
        if layer.gathers_again:
            module.register_forward_pre_hook(_gather_again)
    for name, axes in plan.per_channel.items():
        for tensor, cuts in channel_cuts(axes).items():
            replace_tensor(model.get_submodule(name), tensor, mesh, cuts)
    return plan


def _gather_again(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Said at each call: a weight that is moved or materialised is another object, without its attributes."""
    del args
    setattr(module.weight, GATHERS_AGAIN, True)


def _filter_dim(module: nn.Module) -> int:
    return transposed_filter_dim(module.groups) if isinstance(module, TRANSPOSED) else 0


def _choice(name: str, algorithm: Algorithms) -> Choice:
    if isinstance(algorithm, str):
        return algorithm
    return next((choice for pattern, choice in algorithm.items() if fnmatch.fnmatchcase(name, pattern)), "auto")


def _decider(plan: ChannelPlan, name: str, choice: Choice, mesh: Mesh) -> Any:
    def decide(x: Sharded, plans_of: PlansOf, groups: int) -> ChannelSplit:
        if name in plan.layers:  # a layer that runs twice keeps its first cut
            return plan.layers[name].split
        axes = tuple(axis for axis in CHANNEL_AXES if axis in mesh.axes)
        plan.layers[name] = decide_cut(name, choice, axes, x, plans_of, groups)
        return plan.layers[name].split

    return decide


def decide_cut(
    name: str, choice: Choice, axes: tuple[str, ...], x: Sharded, plans_of: PlansOf, groups: int
) -> LayerCut:
    """The cut of a layer that moves the least for its input, among those that `choice` allows."""
    is_cut = bool(x.layout.cuts[1].axes)
    splits = _possible(name, choice, x.layout.cuts[1].axes or axes, is_cut, groups)
    priced = [(volumes(*plans_of(split)[1:], input_learns=x.requires_grad), split) for split in splits]
    moved, split = min(priced, key=lambda pair: pair[0].total)
    _check_counts(name, x.layout, plans_of(split)[0], split, x.mesh.mesh, groups)
    inputs = plans_of(split)[1]
    return LayerCut(split, moved, max(0, inputs.frame.size - inputs.held.size))


def weight_cuts(module: nn.Module, split: ChannelSplit) -> dict[str, dict[int, tuple[str, ...]]]:
    """How a split cuts the tensors of a layer, by name."""
    filter_dim = _filter_dim(module)
    return {"weight": {filter_dim: split.gathered, 1 - filter_dim: split.kept}, "bias": {0: split.gathered}}


def channel_cuts(axes: tuple[str, ...]) -> dict[str, dict[int, tuple[str, ...]]]:
    """How channels cut by `axes` cut the tensors of a norm, by name."""
    return {name: {0: axes} for name in ("weight", "bias", "running_mean", "running_var")}


def _possible(name: str, choice: Choice, axes: tuple[str, ...], is_cut: bool, groups: int) -> list[ChannelSplit]:
    """The splits that a layer may take. A whole input needs no gathering, and groups none either: cut the filters."""
    if groups > 1 or (not is_cut and choice == "auto"):
        return [ChannelSplit(gathered=axes)]
    found = [split for split in candidates(axes) if choice in ("auto", split.algorithm)]
    if not found:
        raise UnsupportedError(
            f"layer {name!r}: algorithm {choice!r} needs its channels cut by two axes, but they are cut by {axes}; "
            "use a mesh with channel= and filter=, or algorithm 'x', 'y' or 'auto'."
        )
    return found


def _check_counts(name: str, source: Layout, output: Layout, split: ChannelSplit, mesh: Mesh, groups: int) -> None:
    ranks = mesh.extent(split.axes)
    for what, extent, cut_by in (
        ("filters", output.shape[1], split.gathered + split.kept),
        ("channels", source.shape[1], split.kept),
    ):
        if extent < mesh.extent(cut_by):
            raise UnsupportedError(
                f"layer {name!r}: {mesh.extent(cut_by)} ranks > {extent} {what}; the largest split that works is "
                f"{extent} ways. Make the channel axes smaller, or leave it uncut: algorithm={{{name!r}: 'whole'}}."
            )
    if not groups_divide(groups, ranks):
        raise UnsupportedError(
            f"layer {name!r}: {groups} groups do not divide over {ranks} ranks; the largest split that works is "
            f"{largest_split(groups, ranks)} ways."
        )


def replace_tensor(module: nn.Module, name: str, mesh: OpenMesh, cuts: dict[int, tuple[str, ...]]) -> None:
    """Put this rank's shard in place of a whole parameter or buffer, if the module has it."""
    whole = getattr(module, name, None)
    if whole is None:
        return
    shard_ = cut_weight(whole.detach(), mesh, cuts)
    if isinstance(whole, nn.Parameter):
        setattr(module, name, nn.Parameter(shard_, requires_grad=whole.requires_grad))
    else:
        setattr(module, name, shard_)
