"""One rank that trains a few steps and prints what its host sent to the other one meanwhile, in bytes, as JSON.

python -m tests.cluster.crossing
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

import convmesh as cm
from tests.cluster.strategies import bytes_sent
from tests.runtime.training import optimizer, take_steps

STRATEGY, AXES, STEPS, LAYERS, CHANNELS, SHAPE = "data+spatial", {"data": 2, "height": 2}, 3, 4, 8, (4, 8, 32, 128)


def crossing() -> dict[str, int]:
    """Bytes of `STEPS` steps: by this rank to all others, and by its host through the link."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(LAYERS)))
    plan = cm.plan(model, SHAPE, cm.Mesh(**AXES), STRATEGY)
    net = cm.parallelize(model, plan, loss=torch.nn.MSELoss())
    args, opt = (net.shard_input(torch.ones(SHAPE)), net.shard_target(torch.zeros(SHAPE))), optimizer(net.parameters())
    take_steps(opt, lambda: net(*args), 1)  # connections are opened
    dist.barrier()
    before, posted = bytes_sent(), sum(net.mesh.traffic.bytes_sent.values())
    take_steps(opt, lambda: net(*args), STEPS)
    posted = sum(net.mesh.traffic.bytes_sent.values()) - posted
    dist.barrier()
    return {"posted": posted, "crossed": bytes_sent() - before}


if __name__ == "__main__":
    cm.init()
    sys.stdout.write(json.dumps(crossing()) + "\n")
    dist.destroy_process_group()
