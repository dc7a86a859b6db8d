"""The most that a rank holds while a program runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from convmesh.oracle.memory.ledger import Ledger
from convmesh.oracle.memory.liveness import OUTPUTS, Liveness
from convmesh.oracle.memory.stage_turns import Footprint, Turn, heaviest_turns
from convmesh.oracle.pricing.assumptions import STATES, Assumptions
from convmesh.plans.program import NodeProgram, Program
from convmesh.plans.stage_order import Kind, actions_of
from convmesh.plans.steps import Saved, Step, Steps, Transfer, bytes_each

BYTES_BLOCK = 512
"""Block size of a GPU's caching allocator."""
BYTES_PRODUCTS = 2 * (32 << 20)
"""cuBLAS workspace, held once for forward's and once for backward's thread (torch's default on Hopper)."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
FRAGMENTATION = 1.24
"""Bytes reserved by the allocator for each byte of the peak: the median of ten runs in benchmarks/oracle_memory.md."""
BYTES_CONTEXT = 500 << 20
"""Taken on a GPU by CUDA and its libraries for each process; a guess."""
BYTES_NCCL = 300 << 20
"""Buffers of NCCL's channels for a few groups; a guess."""
FORTH_AND_BACK: frozenset[Kind] = frozenset({"forward", "backward"})
LOOPED = frozenset({"interleaved", "zero-bubble"})
STAGE = "stage"
"""The carrier of messages between stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes at the peak, and the layer that runs then."""

    bytes_weights: int
    bytes_gradients: int
    bytes_optimizer: int
    bytes_activations: int
    bytes_buffers: int
    """Short-lived tensors and transfers: gathered tensors, halos, buckets, workspace."""
    layer: str
    phase: str = ""
    bytes_batch: int = 0
    """The rank's part of inputs and targets."""
    bytes_reserved: int = 0
    """Memory a device should have: the peak, the allocator's gaps and the libraries."""
    bytes_libraries: int = 0
    """Taken by CUDA and NCCL."""
    curve: tuple[tuple[str, str, int], ...] = ()
    """Over the step: phase, layer and bytes held."""

    @property
    def bytes_peak(self) -> int:
        held = self.bytes_weights + self.bytes_gradients + self.bytes_optimizer
        return held + self.bytes_activations + self.bytes_buffers + self.bytes_batch

    @property
    def bytes_needed(self) -> int:
        """Memory a device must have; the allocator closes its gaps when memory runs short."""
        return self.bytes_peak + self.bytes_libraries


def memory_of(
    program: Program, assumptions: Assumptions | None = None, *, device: str = "cpu", staged: bool = False
) -> Memory:
    """Peak memory from the lifetimes of the program's tensors, on a `cpu` or in the blocks of a GPU's allocator
    (`cuda`).

    `staged`: messages between stages are kept in host memory, as with Gloo and GPUs.
    """
    program = replace(program, nodes=tuple(map(_off_device, program.nodes))) if staged else program
    ledger = Ledger(BYTES_BLOCK if device == "cuda" else 1)
    _hold_state(program, assumptions or Assumptions(), ledger)
    _hold_batch(program, ledger)
    if program.live and program.stages == 1 and not any(node.block for node in program.nodes):
        _hold_values(program, ledger)
        return _memory(ledger, program.mesh.size if device == "cuda" else 0)
    if device == "cuda" and any(work.op in PRODUCTS for work in program.works()):
        ledger.hold("workspace", BYTES_PRODUCTS, "buffers")
    stages = {stage: [node for node in program.nodes if node.stage == stage] for stage in own_stages(program)}
    graded: set[int] = set()
    for turn in _turns(program, stages):
        for stage in sorted(turn.graded - graded):
            _hold_gradients(program, stages[stage], ledger)
            _hold_first_message(program, stages[stage], ledger)
        graded |= turn.graded
        _pass(program, stages[turn.stage], turn, ledger)
    ledger.moment("update", "")
    return _memory(ledger, program.mesh.size if device == "cuda" else 0)


def _hold_values(program: Program, ledger: Ledger) -> None:
    """Go through the kernels of a compiled step; gradients that are summed go into buckets at once."""
    stay = not program.buckets
    for moment in program.live:
        ledger.hold("values", moment.bytes_held - moment.bytes_gradients, "activations")
        ledger.hold("computed gradients", moment.bytes_gradients if stay else 0, "gradients")
        ledger.moment("backward" if moment.is_backward else "forward", program.nodes[moment.node].layer)
        ledger.release("values")
        ledger.release("computed gradients")
    ledger.hold("computed gradients", program.live[-1].bytes_gradients if stay else 0, "gradients")
    ledger.moment("update", "")


def own_stages(program: Program) -> list[int]:
    """The stages of a program's rank."""
    return sorted({node.stage for node in program.nodes})


def _turns(program: Program, stages: Mapping[int, Sequence[NodeProgram]]) -> list[Turn]:
    """A step on one batch, or the heaviest turns of a pipeline's."""
    if program.stages == 1:
        return [Turn(stage, FORTH_AND_BACK, 0, frozenset()) for stage in stages]
    pipe, place = program.mesh.axes["pipe"], program.mesh.coordinates(program.rank)["pipe"]
    actions = actions_of(program.schedule, pipe, program.stages, program.repeats, place)
    return heaviest_turns(actions, {stage: _footprint(program, nodes) for stage, nodes in stages.items()})


def _footprint(program: Program, nodes: Sequence[NodeProgram]) -> Footprint:
    """Bytes of one micro-batch; looped schedules wait for their messages at the end of a step."""
    ledger = Ledger()
    live = Liveness(program, nodes, ledger)
    live.forward()
    live.send()
    kept = ledger.bytes_held
    splits = program.schedule == "zero-bubble" and nodes[0].stage > 0
    sent = _crossing(s for n in nodes for s in (n.forward, n.backward)) if program.schedule in LOOPED else 0
    return Footprint(kept, _waiting(program, nodes) if splits else kept, sent)


def _waiting(program: Program, nodes: Sequence[NodeProgram]) -> int:
    """Bytes that a stage holds of a micro-batch between its input gradients and its weight gradients."""
    ledger = Ledger()
    live = Liveness(program, nodes, ledger)
    live.forward()
    _go_on(program, nodes, live)
    live.backward_of_input()
    return ledger.bytes_held - (ledger.size(OUTPUTS) if ledger.holders(OUTPUTS) else 0)


def _go_on(program: Program, nodes: Sequence[NodeProgram], live: Liveness) -> None:
    """Go on after a stage's forward: to the loss, or to the next stage."""
    if nodes[-1].stage == program.stages - 1:
        live.loss()
    else:
        live.send()


def _pass(program: Program, nodes: Sequence[NodeProgram], turn: Turn, ledger: Ledger) -> None:
    """Run a micro-batch on a stage; only the turn's own kinds of action count towards the peak."""
    ledger.hold("in flight", turn.bytes_others, "activations")
    live = Liveness(program, nodes, ledger)
    with ledger.seen("forward" in turn.kinds):
        live.forward()
    _go_on(program, nodes, live)
    if turn.stage == 0:  # its input needs no gradient: all of backward runs with the weights
        with ledger.seen(not turn.kinds.isdisjoint({"backward", "weight"})):
            live.backward()
    elif turn.kinds.isdisjoint({"input", "weight"}):
        with ledger.seen("backward" in turn.kinds):
            live.backward()
    else:
        with ledger.seen("input" in turn.kinds):
            live.backward_of_input()
        with ledger.seen("weight" in turn.kinds):
            live.backward_of_weights()
    live.end()
    ledger.release("in flight")


def _memory(ledger: Ledger, gpus: int) -> Memory:
    held, peak = ledger.peak.held, ledger.peak.bytes_held
    libraries = bytes_of_libraries(gpus)
    return Memory(
        bytes_weights=held.get("weights", 0),
        bytes_gradients=held.get("gradients", 0),
        bytes_optimizer=held.get("optimizer", 0),
        bytes_activations=held.get("activations", 0),
        bytes_buffers=held.get("buffers", 0),
        bytes_batch=held.get("batch", 0),
        layer=ledger.peak.layer,
        phase=ledger.peak.phase,
        bytes_reserved=int(peak * FRAGMENTATION) + libraries if gpus else peak,
        bytes_libraries=libraries,
        curve=tuple(ledger.curve),
    )


def bytes_of_libraries(gpus: int) -> int:
    """Bytes that libraries take on each of `gpus` GPUs; 0 on a CPU."""
    return BYTES_CONTEXT + (BYTES_NCCL if gpus > 1 else 0) if gpus else 0


def _hold_state(program: Program, assumed: Assumptions, ledger: Ledger) -> None:
    """Hold what lives from step to step."""
    states = STATES[assumed.optimizer]
    for weight in program.weights:
        ledger.hold(("weight", weight.name), weight.bytes_held, "weights")
        ledger.hold(("state", weight.name), weight.elements * bytes_each(weight.dtype) * states, "optimizer")
    ledger.hold("buckets", program.bytes_buckets, "buffers")


def _hold_gradients(program: Program, nodes: Sequence[NodeProgram], ledger: Ledger) -> None:
    """Hold the gradients of a stage's weights, from its first backward on."""
    names = {name for node in nodes for name in node.weights}
    for weight in program.weights:
        if weight.learns and weight.name in names:
            ledger.hold(("gradient", weight.name), weight.bytes_held, "gradients")


def _hold_first_message(program: Program, nodes: Sequence[NodeProgram], ledger: Ledger) -> None:
    """Hold the first message of a 1F1B schedule, which torch waits for only at the end."""
    if program.schedule == "1f1b" and program.repeats >= program.stages:
        ledger.hold("first message", _crossing(node.forward for node in nodes), "buffers")


def _off_device(node: NodeProgram) -> NodeProgram:
    """A node whose messages are in host memory: sent ones pass through, received ones are copied for use."""
    arrived = _crossing([node.backward])
    if not arrived and not _crossing([node.forward]):
        return node
    held = replace(node.held, outputs=(), gradients=tuple(None for _ in node.held.gradients))
    forward, backward = (tuple(s for s in steps if not _is_message(s)) for steps in (node.forward, node.backward))
    return replace(node, forward=forward, backward=backward, saved=(Saved("own", 0, arrived),), held=held)


def _hold_batch(program: Program, ledger: Ledger) -> None:
    """Hold inputs and targets; in a pipeline also the buffers of arriving and leaving messages.

    A message back is still leaving while the next micro-batch runs; in looped schedules a turn counts it instead.
    """
    ledger.hold("batch", (program.bytes_inputs + program.bytes_targets) * program.repeats, "batch")
    crossing = program.nodes if program.stages > 1 else ()
    onward, back = (_crossing(getattr(node, way) for node in crossing) for way in ("forward", "backward"))
    arriving = program.repeats * (onward + back)
    leaving = back if program.repeats > 1 and program.schedule not in LOOPED else 0
    ledger.hold("crossing", arriving + leaving, "buffers")


def _crossing(lists: Iterable[Steps]) -> int:
    """Bytes of messages to other stages."""
    return sum(step.bytes_sent for steps in lists for step in steps if _is_message(step))


def _is_message(step: Step) -> TypeGuard[Transfer]:
    return isinstance(step, Transfer) and step.carrier == STAGE
