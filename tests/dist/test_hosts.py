"""Which ranks share a host, and plans that count on it."""

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import convmesh as cm
from convmesh import Mesh, PlanError
from convmesh.dist.hosts import ranks_on_each, this_host
from convmesh.testing import RankPool
from convmesh.train.planned import on_hosts_of_job
from convmesh.train.run_config import PlanConfig

Pools = dict[int, RankPool]


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [("aabb", 2), ("aaabbb", 3), ("aabbcc", 2), ("aaaa", 4), ("abcd", 1), ("aab", 1), ("abb", 1), ("abab", 1)],
)
def test_ranks_on_each_host(hosts: str, ranks: int) -> None:
    assert ranks_on_each(hosts) == ranks


def test_a_host_is_one_to_all_of_its_processes(pools: Pools) -> None:
    assert {this_host(), *pools[2].run(this_host)} == {this_host()}


def refusal(hosts: Sequence[str]) -> str:
    """What `parallelize` says of a plan for hosts of two ranks."""
    model = torch.nn.Linear(3, 2)
    plan = cm.plan(model, (8, 3), Mesh(data=4), "data", reduction="hierarchical", ranks_per_host=2)
    with patch("convmesh.dist.hosts.this_host", lambda: hosts[dist.get_rank()]):
        try:
            cm.parallelize(model, plan)
        except PlanError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (("h0 x", "h0 x", "h1 x", "h1 x"), ""),
        (("h0 x", "h0 x", "h0 x", "h0 x"), ""),
        (("h0 x", "h1 x", "h1 x", "h1 x"), "of ranks 0 to 1 some are on h0 and some on h1; make it with `reduction="),
        (("h0 x", "h0 x", "h0 x", "h1 x"), "of ranks 2 to 3 some are on h0 and some on h1; make it with `reduction="),
        (("h0 x", "h1 x", "h2 x", "h3 x"), "of ranks 0 to 1 some are on h0 and some on h1; make it with `reduction="),
        (("h x", "h y", "h y", "h y"), "of ranks 0 to 1 some are on h and some on h; make it with `reduction="),
    ],
)
def test_all_ranks_refuse_hosts_with_other_numbers_of_ranks(pools: Pools, hosts: Sequence[str], says: str) -> None:
    for found in pools[4].run(refusal, hosts):
        assert says in found
        assert bool(found) == bool(says)


def section(hosts: Sequence[str], reduction: str, ranks_per_host: int) -> tuple[str, int]:
    with patch("convmesh.dist.hosts.this_host", lambda: hosts[dist.get_rank()]):
        found = on_hosts_of_job(PlanConfig.model_validate({"reduction": reduction, "ranks_per_host": ranks_per_host}))
    return found.reduction, found.ranks_per_host


@pytest.mark.parametrize(
    ("hosts", "asked", "found"),
    [
        ("aabb", ("hierarchical", 0), ("hierarchical", 2)),
        ("abbb", ("hierarchical", 0), ("bucketed", 0)),
        ("abcd", ("hierarchical", 0), ("bucketed", 0)),
        ("aaaa", ("hierarchical", 2), ("hierarchical", 2)),
        ("aabb", ("bucketed", 0), ("bucketed", 0)),
    ],
)
def test_a_run_file_takes_the_jobs_hosts(
    pools: Pools, hosts: str, asked: tuple[str, int], found: tuple[str, int]
) -> None:
    assert pools[4].run(section, hosts, *asked) == [found] * 4
