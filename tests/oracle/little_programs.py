"""Hand-made programs, without a network, for tests of the schedule."""

from collections.abc import Sequence

from convmesh.layout import Mesh
from convmesh.oracle import Assumptions
from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.oracle.simulate.step import Scheduled, schedule
from convmesh.plans import BucketProgram, NodeProgram, Program, Step, Transfer, Wait, WeightProgram, Work
from convmesh.system import System

SYSTEM = System.load("dgx-a100")
MILLISECOND = int(float(SYSTEM.device.bytes_per_second_memory) / 1000)
"""Bytes that the device reads in a millisecond at its peak rate."""


def work(milliseconds: float) -> Work:
    """A memory-bound operator."""
    size = int(milliseconds * MILLISECOND)
    return Work("copy_", ((size // 8,),), ((size // 8,),), "float32", 0, size)


def all_reduce(mebibytes: float, *axes: str) -> Transfer:
    return Transfer("all_reduce", axes, int(mebibytes * 2**20))


def node(name: str, forward: Sequence[Step], backward: Sequence[Step] = (), weights: Sequence[str] = ()) -> NodeProgram:
    return NodeProgram(name, name, (), (), (), tuple(forward), tuple(backward), weights=tuple(weights))


def program(
    mesh: Mesh, rank: int, nodes: Sequence[NodeProgram], buckets: Sequence[tuple[float, Sequence[str]]] = ()
) -> Program:
    """A program; each bucket has its size of gradients in mebibytes, summed over all axes."""
    names = [name for one in nodes for name in one.weights]
    weights = tuple(WeightProgram(name, (1000, 1000), (1000, 1000), "float32", learns=True) for name in names)
    axes = tuple(mesh.axes)
    made = tuple(BucketProgram(tuple(of), ((all_reduce(size, *axes),), (), ())) for size, of in buckets)
    return Program(mesh, rank, tuple(nodes), weights, made)


def scheduled(*programs: Program) -> Scheduled:
    """The step's times, without jitter."""
    mesh = programs[0].mesh
    compute, transfer = ComputeModel(SYSTEM, Assumptions()), TransferModel(SYSTEM, mesh, Assumptions())
    return schedule({one.rank: one for one in programs}, compute, transfer)


def waited(steps: Sequence[Step], number: int, after: int) -> list[Step]:
    """The steps with a wait for a transfer `after` steps after it is posted, or at the end."""
    posted = [place for place, step in enumerate(steps) if isinstance(step, Transfer)][number]
    index = min(len(steps), posted + 1 + after)
    return [*steps[:index], Wait((number,)), *steps[index:]]
