"""A program as a compiler runs it: its computations replaced by kernels, each as soon as its inputs are there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from convmesh.plans.fused.flow import NO_FLOW
from convmesh.plans.fused.kernels import Kernel, KernelMaker
from convmesh.plans.fused.live_values import moments_of
from convmesh.plans.fused.value_graph import StepValue, ValueGraph
from convmesh.plans.steps import Shape, Step, Work

if TYPE_CHECKING:
    from convmesh.plans.program import NodeProgram, Program

Spot = tuple[int, bool, int]
"""A node, whether backward, and the place among its steps."""

FLOPS: Mapping[str, int] = {
    "gelu": 60, "gelu_backward": 80, "erf": 40, "tanh": 30, "sigmoid": 20, "silu": 25, "silu_backward": 35, "exp": 15,
    "log": 15, "log1p": 25, "pow": 40, "sin": 30, "cos": 30, "mish": 60, "mish_backward": 80, "softplus": 40,
}  # fmt: skip
"""Operations per element of functions that take a GPU longer than reading it. gelu's are from its kernels on an H200,
0.68 and 0.50 million million elements a second; the others are guesses relative to it."""

_STRIDED = re.compile(r", strides=\([^()]*\)\)")


def fused(program: Program) -> Program:
    """The program of a compiled step, with kernels; other programs unchanged.

    A schedule that computes weight gradients separately runs operators one by one.
    """
    if not program.compile or any(node.weight_steps for node in program.nodes):
        return program
    graph = ValueGraph(program.nodes)
    if not graph.ops:
        return program
    kernels = KernelMaker(graph).make()
    return replace(program, nodes=_with_kernels(program.nodes, kernels, graph), live=moments_of(kernels))


def fused_alone(node: NodeProgram) -> NodeProgram:
    """A node, with kernels for its own computations alone."""
    if not node.flow.forward or node.weight_steps:
        return node
    graph = ValueGraph((node,))
    return _with_kernels((node,), KernelMaker(graph).make(), graph)[0]


def _with_kernels(
    nodes: Sequence[NodeProgram], kernels: Sequence[Kernel], graph: ValueGraph
) -> tuple[NodeProgram, ...]:
    works: dict[Spot, list[Work]] = defaultdict(list)
    for kernel in kernels:
        op = graph.ops[kernel.at]
        works[op.node, op.is_backward, op.place].append(_work(kernel, graph.values))
    return tuple(_node(number, node, works) for number, node in enumerate(nodes))


def _node(number: int, node: NodeProgram, works: Mapping[Spot, list[Work]]) -> NodeProgram:
    forward, backward = (
        tuple(_steps(steps, lambda place, late=is_backward: works.get((number, late, place), ())))
        for steps, is_backward in ((node.forward, False), (node.backward, True))
    )
    return replace(node, forward=forward, backward=backward, flow=NO_FLOW)


def _steps(steps: Sequence[Step], works_at: object) -> Iterable[Step]:
    for place, step in enumerate(steps):
        if isinstance(step, Work):
            yield from works_at(place)  # type: ignore[operator]
        else:
            yield step


def _work(kernel: Kernel, values: Sequence[StepValue]) -> Work:
    return _in_order(kernel.members[0].work) if kernel.is_extern else _fused_work(kernel, values)


def _in_order(work: Work) -> Work:
    """A convolution with operands in the memory order that its kernel wants: what computes them writes them so."""
    if not work.op.startswith("convolution") or "strides=" not in work.call:
        return work
    order = ", last=1)" if "last=1" in work.call else ")"
    return replace(work, call=_STRIDED.sub(order, work.call))


def _fused_work(kernel: Kernel, values: Sequence[StepValue]) -> Work:
    reads, writes = (
        [_tensor(values, number) for number, _ in sorted(sizes.items(), key=lambda pair: -pair[1])]
        for sizes in (kernel.reads, kernel.writes)
    )
    moved = sum(kernel.reads.values()) + sum(kernel.writes.values())
    is_last = any("last=1" in op.work.call for op in kernel.members)
    parts = tuple(op.work.op for op in kernel.members)
    flops = sum(FLOPS.get(op.work.op, 0) * op.elements for op in kernel.computed.values())
    return replace(fused_work(kernel.form, reads, writes, is_last, moved, parts), flops=flops)


def _tensor(values: Sequence[StepValue], number: int) -> tuple[str, Shape]:
    """Type and shape; a sign, which has a negative number, takes a byte an element."""
    value = values[number if number >= 0 else ~number]
    return value.dtype if number >= 0 else "bool", value.shape


def fused_work(
    form: str,
    reads: Sequence[tuple[str, Shape]],
    writes: Sequence[tuple[str, Shape]],
    is_last: bool,
    bytes_moved: int,
    parts: tuple[str, ...] = (),
) -> Work:
    """A kernel of a form, from the tensors that it reads and writes; `is_last`: channels are innermost."""
    call = f"fused_{form}.default({_written(reads, is_last)}, {_written(writes, is_last)})"
    inputs, outputs = (tuple(shape for _, shape in tensors) for tensors in (reads, writes))
    dtype = reads[0][0] if reads else writes[0][0] if writes else ""
    return Work(f"fused_{form}", inputs, outputs, dtype, 0, bytes_moved, parts, call)


def _written(tensors: Sequence[tuple[str, Shape]], is_last: bool) -> str:
    return f"({' '.join(f'{dtype}{_shape(shape, is_last)},' for dtype, shape in tensors)})"


def _shape(shape: Shape, is_last: bool) -> str:
    inside = ", ".join(map(str, shape))
    has_order = is_last and len(shape) > 3 and sum(extent > 1 for extent in shape) > 1
    return f"({inside}, last=1)" if has_order else f"({inside})"
