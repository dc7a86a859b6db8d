"""One network on two ranks: one step of training in float64, against the model itself on one process."""

from __future__ import annotations

import copy
import math
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import convmesh as cm
from benchmarks.networks.factories import Published
from benchmarks.networks.findings import Finding
from convmesh.dist import open_mesh
from convmesh.errors import ConvMeshError
from convmesh.graph.checking.drawn_values import cotangent
from convmesh.plans import Plan
from convmesh.private_torch import tree_leaves
from convmesh.runtime import parallelize
from convmesh.runtime.placing import on_layout
from convmesh.testing.ranks import RankError, run_ranks

MESHES = {
    "data": {"data": 2},
    "spatial": {"height": 2},
    "filter": {"filter": 2},
    "channel": {"channel": 4},
    "data+spatial": {"data": 2, "height": 2},
    "data+filter": {"data": 2, "filter": 2},
    "auto": {"data": 2, "height": 2},
}
"""The mesh on which each strategy is tried."""

ON_TWO, ON_FOUR = ("spatial", "filter", "data"), ("channel", "data+spatial", "data+filter", "auto")
"""The strategies by their number of ranks."""

MOST_ERROR = 1e-7
"""The largest difference, relative to the largest value of a tensor, that rounding explains in deep networks."""

NOTHING = 1e-4
"""A tensor this much smaller than the largest counts as that small."""

Tensors = dict[str, torch.Tensor]


def survey(network: Published, strategies: list[str], is_dry: bool) -> Iterator[Finding]:
    """The network under each strategy; a dry survey plans, and runs nothing."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = without_chance(network.model())
    x = torch.randn(network.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state = copy.deepcopy(model.state_dict())
    plans = {}
    for strategy in strategies:
        begun = time.monotonic()
        try:
            plans[strategy] = cm.plan(model, x, cm.Mesh(**MESHES[strategy]), strategy)
        except ConvMeshError as error:
            yield Finding(network.name, strategy, "refused", _line(str(error)), _since(begun))
        if is_dry and strategy in plans:
            yield Finding(network.name, strategy, "planned", "", _since(begun))
    if is_dry:
        return
    expected = _whole_step(model, x) if plans else {}
    model.load_state_dict(state)
    model.zero_grad()
    for strategy, plan in plans.items():
        begun = time.monotonic()
        result, told = _compared(model, plan, x, expected)
        yield Finding(network.name, strategy, result, told, _since(begun))


def without_chance(model: nn.Module) -> nn.Module:
    """The model with nothing dropped and no noise: torch's random numbers are others than ours."""
    for name in ("autoencoderkl", "segresnet", "vqvae"):
        if drawing := sys.modules.get(f"monai.networks.nets.{name}"):
            drawing.torch = _Silent(torch)  # type: ignore[attr-defined]
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout_p", "dropout_rate", "drop_rate", "attn_drop_p", "drop_connect_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


class _Silent:
    """Torch for a module that draws noise, which is zero here."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return torch.zeros_like if name == "randn_like" else getattr(self._own, name)


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 1)


def _whole_step(model: nn.Module, x: torch.Tensor) -> Tensors:
    outputs = _tensors(model(x))
    learning = [(y, cotangent(i, y)) for i, y in enumerate(outputs) if y.requires_grad]
    torch.autograd.backward([y for y, _ in learning], [g for _, g in learning])
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {f"output {i}": y.detach() for i, y in enumerate(outputs)} | gradients


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _split_step(model: nn.Module, plan: Plan, x: torch.Tensor, expected: Tensors) -> tuple[float, str]:
    """On one rank: the largest relative difference, and of what."""
    net = parallelize(model, plan, mesh=open_mesh(plan.mesh, device="cpu"))
    placed = [on_layout(y, None, net.mesh, "the output") for y in _tensors(net(net.shard_input(x)))]
    learning = [(y.local, cotangent(i, y)[y.box.slices()].to(y.local)) for i, y in enumerate(placed) if y.requires_grad]
    torch.autograd.backward([y for y, _ in learning], [g for _, g in learning])
    found = {f"output {i}": y.detach().gather() for i, y in enumerate(placed)}
    found |= {f"gradient of {n}": g for n, g in net.full_gradients().items() if g is not None}
    # A bias before a norm has no gradient but rounding, so the largest of all tensors counts too.
    least = NOTHING * max(whole.abs().max().item() for whole in expected.values())
    return max((_distance(found.get(name), whole, least), name) for name, whole in expected.items())


def _distance(found: torch.Tensor | None, whole: torch.Tensor, least: float) -> float:
    if found is None or found.shape != whole.shape:
        return float("inf") if whole.any() else 0.0
    error = (found - whole).abs().max().item() / max(whole.abs().max().item(), least)
    return float("inf") if math.isnan(error) else error


def _compared(model: nn.Module, plan: Plan, x: torch.Tensor, expected: Tensors) -> tuple[str, str]:
    ranks = plan.mesh.size
    try:
        error, name = max(run_ranks(ranks, _split_step, model, plan, x, expected, seconds_timeout=600.0))
    except (RankError, ConvMeshError) as failure:
        lines = [line for line in str(failure).splitlines() if line.strip()]
        return "crash", _line(" ".join(lines[-3:]))
    return ("exact", "") if error < MOST_ERROR else ("wrong", f"{name} differs by {error:.1g}")


def _line(text: str) -> str:
    """One short line for a table."""
    text = re.sub(r"Use one of: [^;]*;", "", text)
    return " ".join(text.split()).replace("|", "/")[:300]
