"""Sums of gradients over hosts in one ring and in two levels: bytes between the hosts, and the time of a step.

python -m benchmarks.hierarchical [--megabits N] [--repeats N] [--network NAME]   as root: two hosts of two ranks each

Hosts are network namespaces of this machine, with a link of so many Mbit/s between them. Rivals take turns in one group
of ranks. Prints a table of benchmarks/hierarchical.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.cluster.cluster import Cluster
from tests.cluster.line import Link
from tests.cluster.strategies import bytes_sent

import convmesh as cm
from benchmarks.timing import interleave, machine, table
from convmesh.plans import Program
from convmesh.supervise.world import World

ROOT = Path(__file__).parents[1]
HOSTS, RANKS_PER_HOST = 2, 2
RANKS, SLOTS = HOSTS * RANKS_PER_HOST, tuple(range(RANKS_PER_HOST))
PORT = 29_400
SECONDS_QUIET, STEPS_COUNTED = 0.3, 5
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "lenet5": ({}, (16, 1, 32, 32)),
    "resnet18": ({"filters": 16, "classes": 10}, (8, 3, 32, 32)),
}
"""By name: its sizes, and a global batch."""
RIVALS: dict[str, dict[str, Any]] = {
    "one ring": {},
    "two levels": {"reduction": "hierarchical", "ranks_per_host": RANKS_PER_HOST},
    "one ring, bf16": {"compression": "bf16"},
    "two levels, bf16": {"reduction": "hierarchical", "ranks_per_host": RANKS_PER_HOST, "compression": "bf16"},
}


def bytes_leaving(program: Program) -> int:
    """Of gradients, out of one host in a step by the program: a ring leaves a host once."""
    mesh, leaving = program.mesh, 0
    for transfer in program.reduction:
        group = mesh.group(transfer.axes, program.rank)
        here = sum(rank // RANKS_PER_HOST == program.rank // RANKS_PER_HOST for rank in group)
        leaving += transfer.bytes_sent * RANKS_PER_HOST // here if here < len(group) else 0
    return leaving


def net_of(name: str, options: dict[str, Any]) -> cm.ParallelNet:
    sizes, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = cm.models.create(name, **sizes)
    plan = cm.plan(model, shape, cm.Mesh(data=RANKS), "data", batchnorm="replica", **options)
    return cm.parallelize(model, plan, loss=F.cross_entropy)


def counted(step: Any) -> float:
    """Bytes that leave this host in a step, with the headers of packets."""
    dist.barrier()
    time.sleep(SECONDS_QUIET)
    before = bytes_sent()
    for _ in range(STEPS_COUNTED):
        step()
    time.sleep(SECONDS_QUIET)
    return (bytes_sent() - before) / STEPS_COUNTED


def run_rank(name: str, repeats: int, answer: Path) -> None:
    """One rank's part; the first writes what was found."""
    torch.set_num_threads(1)
    cm.init()
    nets = {rival: net_of(name, options) for rival, options in RIVALS.items()}
    x, target = torch.randn(NETWORKS[name][1]), torch.zeros(NETWORKS[name][1][0], dtype=torch.int64)

    def step_of(net: cm.ParallelNet) -> Any:
        shards = net.shard_input(x), net.shard_target(target)

        def step() -> None:
            net.zero_grad()
            net(*shards).backward()

        return step

    steps = {rival: step_of(net) for rival, net in nets.items()}
    for step in steps.values():  # connections are made, and ranks compare what they do
        step()
    found = {
        "bytes": {rival: counted(step) for rival, step in steps.items()},
        "program": {rival: bytes_leaving(net.program) for rival, net in nets.items()},
        "seconds": interleave(steps, repeats),
    }
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def on_hosts(command: list[str], link: Link) -> dict[str, Any]:
    """What the ranks of two hosts find: the first writes it to the file that `command` gets as `--answer`."""
    with tempfile.TemporaryDirectory() as folder, Cluster(HOSTS, link) as cluster:
        answer = Path(folder) / "found.json"
        started = []
        for rank in range(RANKS):
            index, slot = divmod(rank, RANKS_PER_HOST)
            world = World(RANKS, RANKS, SLOTS, rank - slot, cluster.hosts[0].address, PORT, has_other_hosts=True)
            own = {**world.environment(slot), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            call = [sys.executable, "-m", *command, "--answer", str(answer)]
            started.append(cluster.hosts[index].start(call, cwd=ROOT, env=own))
        if codes := [code for process in started if (code := process.wait())]:
            raise SystemExit(f"ranks ended with {codes}")
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


def show(found: dict[str, Any]) -> None:
    print("| rival | bytes out of a host, program | on the link | of one ring's |\n| --- | --- | --- | --- |")
    for rival in RIVALS:
        share = found["bytes"][rival] / found["bytes"]["one ring"]
        print(f"| {rival} | {found['program'][rival]:,} | {found['bytes'][rival]:,.0f} | {share:.2f} |")
    print("\n" + table(found["seconds"], "one ring"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, default="lenet5")
    parser.add_argument("--megabits", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer is not None:
        run_rank(given.network, given.repeats, given.answer)
        return
    print(f"{datetime.date.today()}, {machine()}; `python -m benchmarks.hierarchical {' '.join(sys.argv[1:])}`\n")
    command = ["benchmarks.hierarchical", "--network", given.network, "--repeats", str(given.repeats)]
    show(on_hosts(command, Link(given.megabits)))


if __name__ == "__main__":
    main()
