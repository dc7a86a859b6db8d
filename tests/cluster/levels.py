"""One rank whose gradients are summed in one ring, and inside hosts first; prints what it found as JSON.

python -m tests.cluster.levels: the environment says which rank it is, as torchrun's does.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist

import convmesh as cm
from convmesh.errors import PlanError
from tests.cluster.strategies import NETWORK, bytes_sent
from tests.runtime.training import assert_same, fresh, train_split, train_whole

MESH = cm.Mesh(data=4)


def crossed(options: dict[str, Any]) -> int:
    """Bytes that leave this host while a network trains, which ends as in a single process."""
    dist.barrier()
    before = bytes_sent()
    found = train_split(NETWORK, MESH, "data", options)
    dist.barrier()
    after = bytes_sent()
    assert_same([found], train_whole(NETWORK))
    return after - before


def refused() -> str:
    """What is said of a plan for one host of four ranks."""
    try:
        train_split(NETWORK, MESH, "data", {"reduction": "hierarchical", "ranks_per_host": 4})
    except PlanError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    cm.init()
    told = {
        "one ring": crossed({}),
        "two levels": crossed({"reduction": "hierarchical", "ranks_per_host": 2}),
        "gradients": sum(p.nbytes for p in fresh(NETWORK)[0].parameters()),
        "refused": refused(),
    }
    sys.stdout.write(json.dumps(told) + "\n")
    dist.destroy_process_group()
