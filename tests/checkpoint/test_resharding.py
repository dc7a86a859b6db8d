"""A run continues on another mesh, plan or number of ranks with the losses that it would have had."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from convmesh import Mesh
from tests.checkpoint.runs import continue_run, fused, save_run
from tests.conftest import Pools
from tests.runtime.pipelines import Small

Case = tuple[Mesh, Any, dict[str, Any]]

CASES: dict[str, Case] = {
    "one": (Mesh(data=1), "data", {}),
    "data": (Mesh(data=2), "data", {}),
    "sharded": (Mesh(data=2), "data", {"reduction": "sharded"}),
    "root": (Mesh(data=2), "data", {"reduction": "broadcast"}),
    "spatial": (Mesh(height=2, width=2), "spatial", {}),
    "filter": (Mesh(filter=4), "filter", {}),
    "channel": (Mesh(channel=2), "channel", {}),
    "hybrid": (Mesh(data=2), "hybrid", {}),
    "data+filter, sharded": (Mesh(data=2, filter=2), "data+filter", {"reduction": "sharded"}),
}

STAGED: dict[str, Case] = {
    "one": (Mesh(data=1), "data", {}),
    "pipeline": (Mesh(pipe=2), "pipeline", {"microbatches": 2}),
    "data": (Mesh(data=2), "data", {"reduction": "sharded"}),
    "data+pipeline, sharded": (Mesh(pipe=2, data=2), "data+pipeline", {"microbatches": 2, "reduction": "sharded"}),
    "filter": (Mesh(filter=2), "filter", {}),
    "data+spatial": (Mesh(data=2, height=2), "data+spatial", {}),
}
"""For a network without batch norm and dropout, which micro-batches would change."""

MOMENTUM = {"kind": torch.optim.SGD, "network": Small}


def check(pools: Pools, folder: Path, saved: Case, loaded: Case) -> None:
    expected = pools[saved[0].size].run(save_run, folder, *saved)[0]
    for losses in pools[loaded[0].size].run(continue_run, folder, *loaded):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=1e-9)


def in_a_circle(names: Iterable[str]) -> list[tuple[str, str]]:
    names = list(names)
    return list(zip(names, names[1:] + names[:1], strict=True))


@pytest.mark.parametrize(("saved", "loaded"), in_a_circle(CASES))
def test_run_continues_elsewhere(pools: Pools, tmp_path: Path, saved: str, loaded: str) -> None:
    check(pools, tmp_path, CASES[saved], CASES[loaded])


@pytest.mark.parametrize(("saved", "loaded"), in_a_circle(STAGED))
def test_stages_are_cut_anew(pools: Pools, tmp_path: Path, saved: str, loaded: str) -> None:
    (mesh, strategy, options), (other, another, others) = STAGED[saved], STAGED[loaded]
    check(pools, tmp_path, (mesh, strategy, {**options, **MOMENTUM}), (other, another, {**others, **MOMENTUM}))


FUSED = ["one", "filter, two", "data+filter, sharded", "channel"]
"""Between these, the rows of queries, keys and values that a rank has change."""


@pytest.mark.parametrize(("saved", "loaded"), in_a_circle(FUSED))
def test_fused_projections_are_cut_anew(pools: Pools, tmp_path: Path, saved: str, loaded: str) -> None:
    cases = {**CASES, "filter, two": (Mesh(filter=2), "filter", {})}
    (mesh, strategy, options), (other, another, others) = cases[saved], cases[loaded]
    check(
        pools, tmp_path, (mesh, strategy, {**options, "network": fused}), (other, another, {**others, "network": fused})
    )


@pytest.mark.full
@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product(CASES, CASES)))
def test_every_case_continues_as_every_other(pools: Pools, tmp_path: Path, saved: str, loaded: str) -> None:
    check(pools, tmp_path, CASES[saved], CASES[loaded])
