"""The page docs/support.md, from the trials of every function and the marks of the operator tests."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.networks.findings import Findings, read_findings, slowest, table, totals, when
from benchmarks.networks.left_out import left_out
from benchmarks.networks.published import published

from convmesh import Mesh
from convmesh.ops import supported
from convmesh.ops.core import registry
from convmesh.ops.core.registry import has_handler, listed_name
from tests.support.marks import Drawn, drawn_tests
from tests.support.samples import LABELS
from tests.support.trials import AXES, NO_DIM, Cells

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

HEAD = """# What is supported

This page is generated (`make docs`), and a test fails when it is out of date. A function that is not listed here is
refused with `UnsupportedError` before anything is sent; nothing runs and returns different results.

## Functions on split tensors

Each function is called once with each dim cut over two ranks. Its output, input gradients and parameter gradients are
compared with a single device (relative error below 1e-10 in float64).

| cell | meaning |
| --- | --- |
| ✓ | tested: equal to a single device, for inputs that have this dim |
| ✗ | refused with `UnsupportedError` |
| ? | has a split version, but no test calls it with this dim cut |
| (empty) | the function's input has no such dim |
"""

DRAWN = """## Options tested on drawn shapes

Each line is a property test against a single device: random shapes (odd extents, shards thinner than the halo, fewer
rows than ranks) and random options, on {meshes}; up to {most} dims are cut at once.
Relative error below 1e-10 in float64 and 1e-5 in float32. Options that are not listed are untested.
"""

WEIGHTS = """## Cut weights

Weights are cut by input channels (axis `channel`), by filters (axis `filter`) or by both, together with samples and
space, on {meshes}. Layers that are not listed keep whole weights; their activations may
still be cut by channel, as in the first table.
"""

REFUSED = """## Refused

These common functions have no split version: {functions}.

These spellings of functions in the first table are refused; call the function of `torch.nn.functional`, or of `torch`:
{spellings}.

In whole models, a layer whose `forward` depends on values (data-dependent control flow) is not split. It runs on the
whole batch, on every rank, with a warning that names it; a model whose own `forward` does so is refused.
"""

NETWORKS = """## Published networks

Networks of other packages, unmodified, one step of training in float64 against the model itself on one process
(`make test-networks`): on two ranks under `data`, `spatial` and `filter`; a third of them, drawn anew each time, also
on four ranks under the other strategies. Each row is from the network's last run.

| cell | meaning |
| --- | --- |
| exact | outputs and all gradients agree to 1e-7 of each tensor's largest value, or to what float32 inside it allows |
| refused | refused with the reason, before anything is sent |
| unfinished | the machine had too little time or memory |
| plan, s | processor time of capturing and planning, for the slowest strategy but `auto`; empty: not measured |
| (empty) | not run yet, or not drawn |

A network that computes in float32 inside may differ by 1e-5, or by twice what rounding its input to float32 changes in
the model itself; its last column says how far it is.

{when}.
"""

COMMON = {
    F: (
        "bilinear ctc_loss embedding_bag fractional_max_pool2d fractional_max_pool3d gumbel_softmax kl_div "
        "pairwise_distance"
    ),
    torch: "bincount cdist index_add kron masked_select median nonzero take unique",
}
"""Functions that readers will look for, by their home."""


def page(cells: Mapping[str, Cells]) -> str:
    """The whole page."""
    tests = drawn_tests()
    whole, cut = [t for t in tests if not t.cuts_weights], [t for t in tests if t.cuts_weights]
    parts = [HEAD, _families(cells)]
    parts += [DRAWN.format(meshes=_meshes(whole), most=_most_axes(whole)), _options(whole)]
    parts += [WEIGHTS.format(meshes=_meshes(cut)), _options(cut)]
    parts += [REFUSED.format(functions=_code(_refused()), spellings=_code(_refused_spellings()))]
    parts += _networks(read_findings())
    return "\n".join(parts)


def _networks(findings: Findings) -> list[str]:
    if not findings:
        return []
    waiting = sorted({*published()} - {network for network, _ in findings})
    left = [f"Listed, but not run yet: {', '.join(waiting)}.", ""] if waiting else []
    lines = [
        *totals(findings),
        "",
        slowest(findings),
        "",
        *left,
        *table(findings),
        "",
        "Left out:",
        "",
        *left_out(),
        "",
    ]
    return [NETWORKS.format(when=when(findings.values())), *lines]


def _families(cells: Mapping[str, Cells]) -> str:
    """One table; the functions of a room of `convmesh.ops` that have equal cells share a row."""
    rows: dict[tuple[str, Cells], list[str]] = defaultdict(list)
    homes = _rooms()
    for stem, names in _by_stem(cells).items():
        rows[homes[names[0]], _joined([cells[name] for name in names])].append(_spelt(stem, names))
    head = [f"| family | functions | {' | '.join(AXES)} |", "| --- | --- |" + " :-: |" * len(AXES)]
    lines = [f"| {room} | {_code(names)} | {' | '.join(row)} |" for (room, row), names in sorted(rows.items())]
    return "\n".join([*head, *lines, ""])


def _by_stem(names: Iterable[str]) -> dict[str, list[str]]:
    """Names that differ by 1d, 2d or 3d only, together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        groups[re.sub(r"[123]d(?=$|_)", "#", name)].append(name)
    return groups


def _spelt(stem: str, names: list[str]) -> str:
    return stem.replace("#", "1d/2d/3d") if len(names) == len(LABELS) else names[0]


def _joined(rows: list[Cells]) -> Cells:
    """The cells of functions that differ by their number of dims only; they must not contradict each other."""
    joined = [{*column} - {NO_DIM} or {NO_DIM} for column in zip(*rows, strict=True)]
    assert all(len(column) == 1 for column in joined), rows
    return tuple(column.pop() for column in joined)


def _rooms() -> dict[str, str]:
    """By function name: the room of `convmesh.ops` that has its split version."""
    by_function = registry._handlers.items()
    return {listed_name(function): _module(handler).split(".")[2] for function, handler in by_function}


def _module(handler: Any) -> str:
    return str((handler.func if isinstance(handler, partial) else handler).__module__)


def _options(tests: Iterable[Drawn]) -> str:
    by_operator: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_operator[test.operator].append(test.options)
    lines = [f"| {operator} | {'; '.join(options)} |" for operator, options in by_operator.items()]
    return "\n".join(["| operator | options |", "| --- | --- |", *lines, ""])


def _meshes(tests: Iterable[Drawn]) -> str:
    meshes: dict[Mesh, None] = {mesh: None for test in tests for mesh in test.meshes}
    ranks = sorted({mesh.size for mesh in meshes})
    return f"{len(meshes)} meshes of {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} ranks"


def _most_axes(tests: Iterable[Drawn]) -> int:
    return max(len(mesh.axes) for test in tests for mesh in test.meshes)


def _refused() -> list[str]:
    names = {home: listed.split() for home, listed in COMMON.items()}
    found = [f"{_label(home)}.{name}" for home, listed in names.items() for name in listed]
    assert not any(has_handler(getattr(home, name)) for home, listed in names.items() for name in listed)
    return found


def _refused_spellings() -> list[str]:
    homes = (torch, F, torch.Tensor)
    pairs = ((home, name) for name in supported() for home in homes if callable(getattr(home, name, None)))
    return [f"{_label(home)}.{name}" for home, name in pairs if not has_handler(getattr(home, name))]


def _label(home: Any) -> str:
    return {torch: "torch", F: "F"}.get(home, "x")


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
