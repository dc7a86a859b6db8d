"""The oracle against steps over links of known bandwidth and latency: two hosts, one rank each, one link between them.

python -m benchmarks.links calibrate FOLDER                    this machine's operators, overheads and messages
python -m benchmarks.links measure FOLDER [--fresh] [--parts]  as root: steps, or bare transfers, over every link
python -m benchmarks.links predict FOLDER [--fresh] [--parts]  the same from the calibration and the links' numbers
Prints the tables of benchmarks/links.md.

Hosts are network namespaces of this machine. A process carries their packets as late and as slowly as each link says.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.cluster.line import Link
from tests.cluster.pair import Pair

import convmesh as cm
from benchmarks.timing import machine
from convmesh.dist import open_mesh
from convmesh.measure.calibrate import Budget, calibrate
from convmesh.measure.joined_hosts import joined_hosts
from convmesh.measure.overlap import measure_overlap
from convmesh.measure.timed_carriers import MAKERS
from convmesh.measure.timing import layer_of, slowest, time_after_work
from convmesh.oracle import Assumptions
from convmesh.oracle.pricing.stragglers import expected_maximum
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.planner.predicting import Criterion, programs_of, representatives
from convmesh.plans.steps import Transfer
from convmesh.supervise.world import World
from convmesh.system.curves import TransferCurve
from convmesh.system.operator_table import OperatorTable
from convmesh.system.transfer_table import TransferTable

ROOT = Path(__file__).parents[1]
RANKS, PORT, PRIORITY = 2, 29_400, -10
WARMUPS, STEPS, DISTURBED = 8, 20, 3.0
"""A step that takes three times the median was disturbed by others on this machine, and is left out."""

TEN = (
    (50, 0.05), (50, 5.0), (100, 0.2), (100, 2.0), (200, 1.0),
    (500, 0.1), (500, 5.0), (1000, 0.5), (2000, 0.05), (2000, 5.0),
)  # fmt: skip
"""Mbit/s and ms, chosen before any step was timed or predicted: the corners of both ranges and what lies between."""

CORNERS = tuple(Link(megabits, milliseconds / 1e3) for megabits in (50, 2000) for milliseconds in (0.05, 5.0))
"""Links over which bare transfers are timed."""

FRESH_SEED, FRESH = 20261118, 5
MESSAGES = "messages.json"
CARRIERS, SECONDS_AFTER = ("all_reduce", "neighbour"), 2.0
SIZES = (64, 16 << 10, 256 << 10, 1 << 20)
BYTES_HEADERS, BYTES_FRAME = 66, 1514
"""Of a full packet of TCP over Ethernet: 14 + 20 + 32 bytes of headers, as a link counts them, of 1514."""


@dataclass(frozen=True)
class Case:
    """A network and how it is split over the two hosts."""

    network: str
    sizes: Mapping[str, Any]
    shape: tuple[int, ...]
    mesh: cm.Mesh
    strategy: str
    target: tuple[int, ...]

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return cm.models.create(self.network, **self.sizes)

    def plan(self, model: torch.nn.Module) -> cm.Plan:
        return cm.plan(model, self.shape, self.mesh, self.strategy)

    @property
    def criterion(self) -> Criterion:
        return Criterion(F.cross_entropy, torch.zeros(self.target, dtype=torch.int64))


CASES = {
    "lenet5, data": Case("lenet5", {}, (64, 1, 32, 32), cm.Mesh(data=RANKS), "data", (64,)),
    "unet3d, spatial": Case(
        "unet3d", {"filters": 4, "most_filters": 32, "levels": 3}, (2, 1, 32, 32, 32),
        cm.Mesh(height=RANKS), "spatial", (2, 32, 32, 32),
    ),
}  # fmt: skip


def links(is_fresh: bool) -> list[Link]:
    """The ten, or five drawn evenly on a logarithmic scale from the same ranges."""
    draw = random.Random(FRESH_SEED)
    drawn = [(round(50 * 40 ** draw.random()), round(0.05 * 100 ** draw.random(), 2)) for _ in range(FRESH)]
    return [Link(megabits, milliseconds / 1e3) for megabits, milliseconds in (drawn if is_fresh else TEN)]


def name_of(link: Link) -> str:
    return f"{link.megabits_per_second:g} Mbit/s, {1e3 * link.seconds_latency:g} ms"


# Measured


def steps_of(case: Case) -> list[float]:
    """Seconds of steps one after the other, as in training."""
    model = case.model()
    net = cm.parallelize(model, case.plan(model), loss=F.cross_entropy)
    x, target = net.shard_input(torch.randn(case.shape)), net.shard_target(case.criterion.target)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        net(x, target).backward()
        optimizer.step()

    return periods(step, STEPS)


def all_steps() -> dict[str, list[float]]:
    return {name: steps_of(case) for name, case in CASES.items()}


def periods(call: Callable[[], object], repeats: int) -> list[float]:
    """From one end to the next."""
    ends = []
    for _ in range(WARMUPS + repeats + 1):
        call()
        ends.append(time.perf_counter())
    return [end - begin for begin, end in zip(ends[WARMUPS:], ends[WARMUPS + 1 :], strict=False)]


def parts() -> dict[str, list[float]]:
    """Bare transfers, by carrier and bytes that a rank sends; and how much of one is hidden behind compute."""
    mesh = open_mesh(cm.Mesh(filter=RANKS))
    found = measure_overlap(mesh)
    return {"hidden": [found.hidden], "compute slowdown": [found.compute_slowdown]} | {
        f"{carrier} {size}": periods(MAKERS[carrier](mesh, size), STEPS // 2) for carrier in CARRIERS for size in SIZES
    }


def messages() -> dict[str, Any]:
    """What the library takes for transfers between two hosts, one right after the other, and the ranks' jitter.

    After a layer a rank also waits for the other one, the longer the layer takes: that is jitter, not the library.
    """
    mesh = open_mesh(cm.Mesh(filter=RANKS))
    work = layer_of(mesh)
    seconds_layer = slowest(mesh, statistics.median(periods(work, STEPS)))
    curves, waits = [], []
    for carrier in CARRIERS:
        seconds = [statistics.median(periods(MAKERS[carrier](mesh, size), STEPS)) for size in SIZES]
        rising = tuple(itertools.accumulate(seconds, max))
        curves.append(TransferCurve(carrier=carrier, ranks=RANKS, active=RANKS, bytes_sent=SIZES, seconds=rising))
        after = time_after_work(mesh, MAKERS[carrier](mesh, SIZES[0]), SECONDS_AFTER).seconds
        waits.append(max(0.0, after - seconds[0]))
    table = TransferTable(backend="gloo", cores=RANKS, curves=tuple(curves))
    jitter = statistics.mean(waits) / seconds_layer / expected_maximum(RANKS)
    return {"table": asdict(table), "jitter": jitter, "layer": seconds_layer}


def run_rank(what: str, answer: Path) -> None:
    """One rank's part; the first writes what was found."""
    torch.set_num_threads(1)
    cm.init()
    found = FINDERS[what]()
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


FINDERS: dict[str, Callable[[], dict[str, Any]]] = {"steps": all_steps, "parts": parts, "messages": messages}


def measured(link: Link, what: str) -> dict[str, Any]:
    """What ranks on two hosts find."""
    with tempfile.TemporaryDirectory() as folder, Pair(link) as pair:
        answer = Path(folder) / "found.json"
        call = [sys.executable, "-m", "benchmarks.links", "rank", str(answer), "--what", what]
        started = []
        for rank, host in enumerate(pair.hosts):
            world = World(RANKS, RANKS, (0,), rank, pair.hosts[0].address, PORT, has_other_hosts=True)
            own = {**world.environment(0), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            started.append(host.start(call, cwd=ROOT, env=own))
        if codes := [code for process in started if (code := process.wait())]:
            raise SystemExit(f"ranks ended with {codes}")
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


def measure(folder: Path, is_fresh: bool, is_parts: bool, rounds: int) -> None:
    """Every link in turn, and again."""
    with file_of(folder, is_fresh, is_parts).open("a") as kept:
        for _ in range(rounds):
            for link in CORNERS if is_parts else links(is_fresh):
                found = measured(link, "parts" if is_parts else "steps")
                kept.write(json.dumps({"link": name_of(link), "seconds": found}) + "\n")
                kept.flush()
                print(
                    name_of(link), {name: f"{1e3 * statistics.median(s):.2f}" for name, s in found.items()}, flush=True
                )


def file_of(folder: Path, is_fresh: bool, is_parts: bool) -> Path:
    return folder / f"{'parts' if is_parts else 'steps'}{'-fresh' * is_fresh}.jsonl"


def gathered(path: Path) -> dict[str, dict[str, list[float]]]:
    """By link and case: seconds of all rounds, without disturbed ones."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        for name, seconds in row["seconds"].items():
            found.setdefault(row["link"], {}).setdefault(name, []).extend(seconds)
    return {link: {name: undisturbed(seconds) for name, seconds in cases.items()} for link, cases in found.items()}


def undisturbed(seconds: Sequence[float]) -> list[float]:
    middle = statistics.median(seconds)
    return [each for each in seconds if each < DISTURBED * middle]


# Predicted


def programs() -> Iterator[cm.Program]:
    for case in CASES.values():
        plan = case.plan(case.model())
        yield from programs_of(plan, representatives(plan.mesh, borders=True), case.criterion, device="cpu").values()


def calibrated(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    budget = Budget(seconds=150.0, seconds_transfers=40.0)
    calibrate(
        [], (RANKS,), programs=list(programs()), output=folder / "local.toml", budget=budget,
        progress=lambda text: print(text, flush=True),
    )  # fmt: skip
    (folder / MESSAGES).write_text(json.dumps(measured(Link(), "messages")))


def local_of(folder: Path) -> tuple[cm.System, Assumptions]:
    """The calibrated machine with messages as they are between hosts: inside one they go another way."""
    found = json.loads((folder / MESSAGES).read_text())
    with tempfile.TemporaryDirectory() as place:
        table = Path(place) / "table.json"
        table.write_text(json.dumps(found["table"]))
        transfers = TransferTable.load(table)
    return replace(cm.System.load(folder / "local.toml"), transfers=transfers), Assumptions(jitter=found["jitter"])


def beside_another(table: OperatorTable) -> OperatorTable:
    """Times on a host of one rank: that of one core of this machine while the other one computes, too."""
    timings = tuple(replace(timing, active=1) for timing in table.timings if timing.active == RANKS)
    suffix = f" x{RANKS}"
    updates = {key.removesuffix(suffix): timing for key, timing in table.updates.items() if key.endswith(suffix)}
    return replace(table, timings=timings, updates=updates)


def system_over(local: cm.System, link: Link) -> cm.System:
    """This machine as two hosts joined by a link; nothing of it comes from steps."""
    hosts = joined_hosts(
        local,
        bytes_per_second=link.megabits_per_second * 1e6 / 8,
        seconds_latency=link.seconds_latency,
        fraction_wire=1 - BYTES_HEADERS / BYTES_FRAME,
    )
    assert local.operators is not None
    return replace(hosts, operators=beside_another(local.operators))


def predicted(local: cm.System, assumed: Assumptions, link: Link, is_parts: bool) -> dict[str, float]:
    system = system_over(local, link)
    if is_parts:
        return {f"{carrier} {size}": priced(system, carrier, size) for carrier in CARRIERS for size in SIZES}
    return {name: predicted_step(case, system, assumed) for name, case in CASES.items()}


def predicted_step(case: Case, system: cm.System, assumed: Assumptions) -> float:
    criterion = case.criterion
    found = cm.predict(case.plan(case.model()), system, assumed, loss=criterion.loss, target=criterion.target)
    return float(found.seconds_step)


def priced(system: cm.System, carrier: str, size: int) -> float:
    transfer = Transfer(carrier=carrier, axes=("filter",), bytes_sent=size, peer=1 if carrier == "neighbour" else None)
    return float(TransferModel(system, cm.Mesh(filter=RANKS)).transfer(transfer, 0).value)


def show(folder: Path, is_fresh: bool, is_parts: bool) -> None:
    """The table."""
    (local, assumed), found = local_of(folder), gathered(file_of(folder, is_fresh, is_parts))
    accuracies: dict[str, list[float]] = {}
    print("| link | what | steps | measured, ms | quartiles, ms | predicted, ms | accuracy |")
    print("| --- " * 7 + "|")
    for link in CORNERS if is_parts else links(is_fresh):
        for name, seconds in predicted(local, assumed, link, is_parts).items():
            times = found[name_of(link)][name]
            low, middle, high = statistics.quantiles(times, n=4)
            accuracy = 1 - abs(seconds - middle) / middle
            accuracies.setdefault(name, []).append(accuracy)
            print(
                f"| {name_of(link)} | {name} | {len(times)} | {1e3 * middle:.2f} | {1e3 * low:.2f} to {1e3 * high:.2f} "
                f"| {1e3 * seconds:.2f} | {accuracy:.1%} |"
            )
    print()
    for name, each in accuracies.items():
        print(f"{name}: mean {statistics.mean(each):.1%}, least {min(each):.1%}")
    print(f"all: mean {statistics.mean(a for each in accuracies.values() for a in each):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("calibrate", "measure", "predict", "rank"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fresh", action="store_true", help="five links drawn at random instead of the ten")
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often all links take their turn; added to earlier ones"
    )
    parser.add_argument("--what", choices=FINDERS, default="steps", help=argparse.SUPPRESS)
    parser.add_argument("--parts", action="store_true", help="bare transfers instead of steps")
    given = parser.parse_args()
    if given.action == "rank":
        run_rank(given.what, given.folder)
        return
    print(f"{datetime.date.today()}, {machine()}; `python -m benchmarks.links {' '.join(sys.argv[1:])}`\n", flush=True)
    if given.action != "predict":
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)  # others work on this machine
    if given.action == "calibrate":
        calibrated(given.folder)
    elif given.action == "measure":
        measure(given.folder, given.fresh, given.parts, given.rounds)
    else:
        show(given.folder, given.fresh, given.parts)


if __name__ == "__main__":
    main()
