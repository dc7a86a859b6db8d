"""One network on two ranks: one step of training in float64, against the model itself on one process."""

from __future__ import annotations

import copy
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

import convmesh as cm
from benchmarks.networks.factories import Published
from benchmarks.networks.findings import PLANNED, Finding
from convmesh.dist import open_mesh
from convmesh.errors import ConvMeshError
from convmesh.graph import Captured, capture
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

OF_PROCESSORS = "fugaku"
"""A system whose ranks run on processors, as they do here: the ranks then lower nothing that planning lowered."""

MOST_ERROR = 1e-7
"""The largest difference, relative to the largest value of a tensor, that rounding explains in deep networks."""

MOST_ERROR_FLOAT32 = 1e-5
"""The same for networks that compute in float32 inside."""

FACTOR_NOISE = 2.0
"""How much more than one rounding of its input may change such a network: it rounds in every layer."""

NOTHING = 1e-4
"""A tensor this much smaller than the largest counts as that small."""

Tensors = dict[str, torch.Tensor]


def survey(network: Published, strategies: list[str]) -> Iterator[Finding]:
    """The network under each strategy, all against one step of the model."""
    model, x = without_chance(_alone(network.model)), network.batch()
    state = copy.deepcopy(model.state_dict())
    plans: dict[str, Plan] = {}
    for strategy, plan, told, _ in _planned(model, x, strategies):
        if plan is None:
            yield Finding(network.name, strategy, "refused", told)
        else:
            plans[strategy] = plan
    expected = _whole_step(model, x) if plans else {}
    model.load_state_dict(state)
    model.zero_grad()
    for strategy, plan in plans.items():
        begun = time.monotonic()
        result, told = _compared(model, plan, x, expected)
        yield Finding(network.name, strategy, result, told, _since(begun))


def planning(network: Published, strategies: list[str]) -> Iterator[Finding]:
    """How long capturing and planning take, with the network as users bring it."""
    model, x = _alone(network.as_built), network.batch(torch.float32)
    for strategy, plan, told, seconds in _planned(model, x, strategies):
        yield Finding(network.name, strategy, PLANNED if plan else "refused", told, seconds_plan=seconds)


def _alone(build: Callable[[], nn.Module]) -> nn.Module:
    """A model for a process with one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return build()


class _Planned(NamedTuple):
    """A strategy's plan, or why there is none, and the processor time of capturing and planning."""

    strategy: str
    plan: Plan | None
    told: str
    seconds: float


def _planned(model: nn.Module, x: torch.Tensor, strategies: list[str]) -> Iterator[_Planned]:
    begun = time.process_time()
    try:
        captured = capture(model, x)
    except ConvMeshError as error:
        yield from (_Planned(strategy, None, _line(str(error)), 0.0) for strategy in strategies)
        return
    seconds_capture = time.process_time() - begun
    for strategy in strategies:
        begun = time.process_time()
        plan, told = _plan(captured, x, strategy)
        yield _Planned(strategy, plan, told, round(seconds_capture + time.process_time() - begun, 2))


def _plan(captured: Captured, x: torch.Tensor, strategy: str) -> tuple[Plan | None, str]:
    apart = replace(captured, derived={})  # what one strategy derives would make the next ones look quick
    try:
        return cm.plan(apart, x, cm.Mesh(**MESHES[strategy]), strategy, system=OF_PROCESSORS), ""
    except ConvMeshError as error:
        return None, _line(str(error))


_OF_CHANCE = (
    "p", "drop_prob", "dropout_p", "dropout_rate", "drop_rate", "attn_drop_p", "drop_connect_rate",
    "_drop_connect_rate",
)  # fmt: skip


def without_chance(model: nn.Module) -> nn.Module:
    """The model with nothing dropped and no noise: torch's random numbers are others than ours."""
    for name in ("autoencoderkl", "fullyconnectednet", "segresnet", "varautoencoder"):
        if drawing := sys.modules.get(f"monai.networks.nets.{name}"):
            drawing.torch = _Silent(torch)  # type: ignore[attr-defined]
    for module in model.modules():
        for name in _OF_CHANCE:
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
    outputs = tensors_of(model(x))
    learning = [(y, cotangent(i, y)) for i, y in enumerate(outputs) if y.requires_grad]
    torch.autograd.backward([y for y, _ in learning], [g for _, g in learning])
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {f"output {i}": y.detach() for i, y in enumerate(outputs)} | gradients


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in whatever a network returns."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _split_step(model: nn.Module, plan: Plan, x: torch.Tensor, expected: Tensors) -> tuple[float, str]:
    """On one rank: the largest relative difference, and of what."""
    net = parallelize(model, plan, mesh=open_mesh(plan.mesh, device="cpu"))
    placed = [on_layout(y, None, net.mesh, "the output") for y in tensors_of(net(net.shard_input(x)))]
    learning = [(y.local, cotangent(i, y)[y.box.slices()].to(y.local)) for i, y in enumerate(placed) if y.requires_grad]
    torch.autograd.backward([y for y, _ in learning], [g for _, g in learning])
    found = {f"output {i}": y.detach().gather() for i, y in enumerate(placed)}
    found |= {f"gradient of {n}": g for n, g in net.full_gradients().items() if g is not None}
    return _difference(found, expected)


def _difference(found: Tensors, expected: Tensors) -> tuple[float, str]:
    """The largest relative difference, and of what."""
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
        return failure_of(lines[-1] if lines else "")
    if error < MOST_ERROR:
        return "exact", ""
    if computes_in_float32(plan) and error < max(MOST_ERROR_FLOAT32, FACTOR_NOISE * _noise(model, x, expected)):
        return "exact", f"to {error:.0e}: it computes in float32 inside"
    return "wrong", f"{name} differs by {error:.1g}"


def _noise(model: nn.Module, x: torch.Tensor, expected: Tensors) -> float:
    """How far the network itself is from its own step when its input is rounded to float32."""
    rounded = _whole_step(copy.deepcopy(model), x.float().to(x.dtype))
    return _difference(rounded, expected)[0]


def failure_of(text: str) -> tuple[str, str]:
    """A crash, unless the machine is too small."""
    if "can't allocate memory" in text or "MemoryError" in text:
        return "unfinished", "takes more memory than there is here"
    return "crash", _line(text)


def computes_in_float32(plan: Plan) -> bool:
    """Whether the network casts down by itself, as some norms do: it can be no more exact than that."""
    captured = plan.source
    assert isinstance(captured, Captured)
    return any(value.dtype == "float32" for node in captured.graph.nodes for value in node.outputs)


def _line(text: str) -> str:
    """One short line for a table."""
    text = re.sub(r"Use one of: [^;]*;", "", text)
    return " ".join(text.split()).replace("|", "/")[:300]
