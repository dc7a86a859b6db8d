"""Cutting the channels of a bare model: its weights become shards, its code runs as it is.

`cut_channels` does not use `plan`, because a plan owns more than `cut_channels` may touch. A plan captures the network,
chooses the layout of every tensor including the inputs, redistributes where two layers disagree, and runs the result in
its own net. `cut_channels` leaves `forward` to its author: nothing is captured, inputs come as `cut` says, and every
layer takes its input as the layer before left it. It also bounds what gathered inputs hold (`most_gathered`), which a
split cannot express. Both take algorithms, refusals and cuts from the same rules (`channel_rules`), so they decide
alike for the same layouts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from convmesh.dist import OpenMesh, dry_mesh
from convmesh.layout import Mesh
from convmesh.layout.channels import ChannelSplit
from convmesh.layout.mesh import CHANNEL_AXES
from convmesh.lowering.channel_rules import (
    LAYERS,
    PER_CHANNEL,
    Asked,
    Choice,
    LayerCut,
    PlansOf,
    channel_cuts,
    decide_cut,
    replace_tensor,
    weight_cuts,
)
from convmesh.ops.channels.channel_layers import GATHERS_AGAIN
from convmesh.ops.channels.undecided_weight import Decide, PlannedWeight
from convmesh.ops.core.sharded import CutOf, Sharded, shard
from convmesh.private_torch.module_tables import call_with, named_tensors

Algorithms = Choice | Mapping[str, Choice]
SampleShape = Sequence[int] | torch.Tensor


@dataclass
class ChannelPlan:
    """The cut of every layer, and the axes that cut the channels of every norm."""

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
        """Let layers gather again until at most `most` extra elements are kept.

        Layers that save the most memory per element sent again come first.
        """
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
    sample: SampleShape,
    mesh: Mesh,
    cut: CutOf | None = None,
    algorithm: Algorithms = "auto",
    most_gathered: int | None = None,
) -> ChannelPlan:
    """Decide the cut of every layer for inputs of a global shape, cut as `cut` says; needs no processes.

    `sample` is that shape, or a tensor of it, whose dtype and `requires_grad` count too. `algorithm` is one choice for
    all layers, or maps patterns of layer names to choices; "whole" leaves a layer uncut. `most_gathered` bounds the
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


def _without_data(sample: SampleShape, model: nn.Module) -> torch.Tensor:
    if isinstance(sample, torch.Tensor):
        return torch.empty(sample.shape, dtype=sample.dtype, device="meta")
    dtype = next((p.dtype for p in model.parameters()), None)
    return torch.empty(tuple(sample), dtype=dtype, device="meta")


def _dry_run(model: nn.Module, x: Sharded, plan: ChannelPlan, algorithm: Algorithms) -> None:
    """Run the model without data: layers decide on their cuts, and norms note how their channels arrive."""
    names = {id(module): name for name, module in model.named_modules()}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(args[0], Sharded) and args[0].layout.is_cut(1):
            plan.per_channel[names[id(module)]] = args[0].layout.cuts[1].axes

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, PER_CHANNEL)]
    try:
        call_with(model, _undecided(model, plan, algorithm, x.mesh.mesh), (x,), {})
    finally:
        for hook in hooks:
            hook.remove()


def _undecided(model: nn.Module, plan: ChannelPlan, algorithm: Algorithms, mesh: Mesh) -> dict[str, torch.Tensor]:
    """The model's tensors without data; weights of layers that may be cut decide when they meet their input."""
    tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in named_tensors(model)}
    for name, module in model.named_modules():
        if isinstance(module, LAYERS) and (choice := _choice(name, algorithm)) != "whole":
            key = f"{name}.weight" if name else "weight"
            tensors[key] = PlannedWeight.of(module.weight, _decider(plan, name, choice, mesh))
    return tensors


def _choice(name: str, algorithm: Algorithms) -> Choice:
    if isinstance(algorithm, str):
        return algorithm
    return next((choice for pattern, choice in algorithm.items() if fnmatch.fnmatchcase(name, pattern)), "auto")


def _decider(plan: ChannelPlan, name: str, choice: Choice, mesh: Mesh) -> Decide:
    asked = Asked(name, choice, tuple(axis for axis in CHANNEL_AXES if axis in mesh.axes))

    def decide(x: Sharded, plans_of: PlansOf, groups: int, dim: int) -> ChannelSplit:
        if name not in plan.layers:  # a layer that runs twice keeps its first cut
            plan.layers[name] = decide_cut(asked, x, plans_of, groups, dim)
        return plan.layers[name].split

    return decide


def cut_channels(
    model: nn.Module,
    sample: SampleShape,
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
    """Set the mark at each call: a weight that was moved or materialised is a new object without its attributes."""
    del args
    setattr(module.weight, GATHERS_AGAIN, True)
