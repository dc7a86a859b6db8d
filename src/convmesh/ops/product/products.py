"""Split matrix products and `einsum` of activations."""

from __future__ import annotations

import string
from functools import partial
from typing import Any

import torch

from convmesh.errors import UnsupportedError
from convmesh.ops.core.probe import probe
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.ops.product.contraction import Contraction, Labels, contract

_T = torch.Tensor
Operand = Sharded | torch.Tensor


def matrix_product(a: Operand, b: Operand) -> Sharded:
    """`torch.matmul` of any two tensors: the last dim of `a` meets the last but one of `b`, others broadcast."""
    torch.matmul(probe(a), probe(b))  # torch's own error, on every rank
    return contract(_matmul(a.dim(), b.dim()), _all_sharded(a, b), torch.matmul)


def _all_sharded(*operands: Operand) -> list[Sharded]:
    mesh = next(x.mesh for x in operands if isinstance(x, Sharded))
    return [on_mesh(x, mesh) for x in operands]


def _matmul(left: int, right: int) -> Contraction:
    lead = _batch(max(left, right) - 2)
    a = (*lead[len(lead) - max(left - 2, 0) :], *(("row",) if left > 1 else ()), "met")
    b = (*lead[len(lead) - max(right - 2, 0) :], "met", *(("column",) if right > 1 else ()))
    result = (*lead, *(("row",) if left > 1 else ()), *(("column",) if right > 1 else ()))
    return Contraction((a, b), result)


def _batch(dims: int) -> Labels:
    return tuple(f"batch {dim}" for dim in range(dims))


@implements(torch.bmm, _T.bmm)
def bmm(input: Operand, mat2: Operand) -> Sharded:  # noqa: A002 - torch's name
    """Matrix products of two batches."""
    torch.bmm(probe(input), probe(mat2))
    return contract(_matmul(3, 3), _all_sharded(input, mat2), torch.bmm)


@implements(torch.baddbmm, _T.baddbmm)
def baddbmm(input: Any, batch1: Operand, batch2: Operand, *, beta: float = 1, alpha: float = 1) -> Any:  # noqa: A002
    """`beta * input + alpha * batch1 @ batch2`."""
    product: Any = bmm(batch1, batch2)
    scaled = product if alpha == 1 else product * alpha
    return scaled if beta == 0 else torch.add(scaled, input, alpha=beta)


@implements(torch.addmm, _T.addmm)
def addmm(input: Any, mat1: Operand, mat2: Operand, *, beta: float = 1, alpha: float = 1) -> Any:  # noqa: A002
    """`beta * input + alpha * mat1 @ mat2`."""
    product: Any = matrix_product(mat1, mat2)
    scaled = product if alpha == 1 else product * alpha
    return scaled if beta == 0 else torch.add(scaled, input, alpha=beta)


@implements(torch.outer, _T.outer)
def outer(input: Operand, vec2: Operand) -> Sharded:  # noqa: A002
    """All products of two vectors' elements."""
    return contract(Contraction((("row",), ("column",)), ("row", "column")), _all_sharded(input, vec2), torch.outer)


@implements(torch.einsum)
def einsum(equation: str, *operands: Any) -> Sharded:
    """`torch.einsum` with an equation in letters; an operand may not use a letter twice."""
    if not isinstance(equation, str):
        raise UnsupportedError("`einsum`: the split version takes an equation in letters, such as 'bhid,bhjd->bhij'.")
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    torch.einsum(equation, *(probe(x) for x in given))
    terms = _of_equation(equation, [x.dim() for x in given])
    return contract(terms, _all_sharded(*given), partial(torch.einsum, _written(terms)))


@implements(torch.tensordot)
def tensordot(a: Operand, b: Operand, dims: Any = 2, out: None = None) -> Sharded:
    """A product that sums over some dims of `a` and the same number of dims of `b`."""
    del out  # refused for every operator
    torch.tensordot(probe(a), probe(b), dims)
    if isinstance(dims, int):
        dims = ([*range(a.dim() - dims, a.dim())], [*range(dims)])
    left, right = ([dim % x.dim() for dim in met] for x, met in ((a, dims[0]), (b, dims[1])))
    rows, columns = [f"row {dim}" for dim in range(a.dim())], [f"column {dim}" for dim in range(b.dim())]
    for i, j in zip(left, right, strict=True):
        columns[j] = rows[i]
    kept = [*(n for i, n in enumerate(rows) if i not in left), *(n for j, n in enumerate(columns) if j not in right)]
    terms = Contraction((tuple(rows), tuple(columns)), tuple(kept))
    return contract(terms, _all_sharded(a, b), partial(torch.einsum, _written(terms)))


def _of_equation(equation: str, dims: list[int]) -> Contraction:
    left, arrow, right = equation.replace(" ", "").partition("->")
    letters = left.split(",")
    most = max((n - len(term.replace("...", "")) for term, n in zip(letters, dims, strict=True)), default=0)
    operands = tuple(_spelled(term, n, most) for term, n in zip(letters, dims, strict=True))
    for term, labels in zip(letters, operands, strict=True):
        if len({*labels}) < len(labels):
            raise UnsupportedError(f"`einsum`: {term!r} takes a diagonal, which has no split version.")
    if not arrow:
        once = sorted(c for c in {*left} if c.isalpha() and left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    return Contraction(operands, _spelled(right, len(right.replace("...", "")) + most * ("..." in right), most))


def _spelled(term: str, dims: int, most: int) -> Labels:
    """The label of every dim of a term; those that `...` stands for count from the right."""
    before, dots, after = term.partition("...")
    inner = dims - len(before) - len(after) if dots else 0
    return (*before, *_batch(most)[most - inner :], *after)


def _written(terms: Contraction) -> str:
    """The equation with a letter for every label."""
    labels = dict.fromkeys(label for term in (*terms.operands, terms.result) for label in term)
    letter = dict(zip(labels, string.ascii_letters, strict=False))
    spell = ["".join(letter[label] for label in term) for term in (*terms.operands, terms.result)]
    return f"{','.join(spell[:-1])}->{spell[-1]}"
