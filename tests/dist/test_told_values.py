"""Values that ranks tell each other arrive as they were, whatever their lengths."""

from typing import Any

import torch.distributed as dist

from convmesh.dist.told_values import value_of, values_of_all
from convmesh.testing import run_ranks

VALUES: list[Any] = [None, ["ä" * 1000, 7, None], {"a": [1.5, "\n"]}]


def told() -> tuple[list[Any], list[Any]]:
    mine = VALUES[dist.get_rank()]
    return values_of_all(dist.group.WORLD, 3, mine), [value_of(source, mine) for source in range(3)]


def test_all_ranks_hear_all_values() -> None:
    for everyone, one_by_one in run_ranks(3, told):
        assert everyone == VALUES
        assert one_by_one == VALUES
