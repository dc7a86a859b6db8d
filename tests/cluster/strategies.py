"""One rank that trains the same network under every strategy; prints what it found as JSON.

python -m tests.cluster.strategies: the environment says which rank it is, as torchrun's does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import convmesh as cm
from tests.runtime.training import assert_same, train_split, train_whole

MESHES: dict[str, dict[str, int]] = {
    "data": {"data": 4},
    "spatial": {"height": 2, "width": 2},
    "filter": {"filter": 4},
    "channel": {"channel": 4},
    "pipeline": {"pipe": 4},
    "data+filter": {"data": 2, "filter": 2},
    "data+spatial": {"data": 2, "height": 2},
    "hybrid": {"data": 4},
}
NETWORK = "lenet5"


def bytes_sent() -> int:
    """By this host through its link so far."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == "eth0":
            return int(numbers.split()[8])
    return 0


def trained(strategy: str) -> dict[str, Any]:
    """Train on this rank; raises where a loss, gradient or weight differs from a single process's."""
    dist.barrier()
    before = bytes_sent()
    found = train_split(NETWORK, cm.Mesh(**MESHES[strategy]), strategy)
    dist.barrier()
    after = bytes_sent()
    assert_same([found], train_whole(NETWORK))
    return {"strategy": strategy, "losses": found.losses, "bytes_sent": after - before}


if __name__ == "__main__":
    cm.init()
    for each in sys.argv[1:] or MESHES:
        sys.stdout.write(json.dumps(trained(each)) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()
