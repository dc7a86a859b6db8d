"""One rank's part of the layers whose channels can be cut: forward and both gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from convmesh.kernels.conv_params import ConvParams
from convmesh.kernels.local_conv import convolution, convolution_backward
from convmesh.layout.terms import Term, symmetric_padding
from convmesh.ops.core.padding import pad_dims, unpad_dims

Pads = list[tuple[int, int]]


def constant(shape: tuple[int, ...], like: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """An output that no input reaches: empty, or with windows that cover only padding."""
    y = like.new_zeros(shape)
    return y if bias is None else y.add_(bias.view(-1, *[1] * (y.dim() - 2)))


def term_call(term: Term, stride: tuple[int, ...], dilation: tuple[int, ...], groups: int) -> tuple[ConvParams, Pads]:
    """The local convolution for a term, and the explicit padding that its input needs first."""
    paddings = [symmetric_padding(d, s, r) for d, s, r in zip(term.dims, stride, dilation, strict=True)]
    params = ConvParams(stride, tuple(both for *_, both in paddings), dilation, groups)
    return params, [(low, high) for low, high, _ in paddings]


@dataclass(frozen=True)
class LocalConv:
    """Convolution of the gathered input: the one `term` that covers the rank's output, if anything reaches it."""

    term: Term | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    kind: str
    """The kind of device whose kernels it calls."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.term is None or not weight.numel():
            return constant(self.shape, x, bias)
        params, pads = term_call(self.term, self.stride, self.dilation, self.groups)
        return convolution(pad_dims(x, pads), weight, bias, params, self.kind)

    def input_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.term is None or not weight.numel():
            return torch.zeros_like(x)
        params, pads = term_call(self.term, self.stride, self.dilation, self.groups)
        dx, _ = convolution_backward(dy, pad_dims(x, pads), weight, params, (True, False), self.kind)
        assert dx is not None
        return unpad_dims(dx, pads)

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.term is None or not weight.numel():
            return torch.zeros_like(weight)
        params, pads = term_call(self.term, self.stride, self.dilation, self.groups)
        _, dw = convolution_backward(dy, pad_dims(x, pads), weight, params, (False, True), self.kind)
        assert dw is not None
        return dw


@dataclass(frozen=True)
class LocalTransposed:
    """Transposed convolution of the gathered inputs, cropped (or zero-padded) to the rank's output by `pads`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    pads: tuple[tuple[int, int], ...]

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not x.numel() or not weight.numel():
            return constant(self.shape, x, bias)
        y: torch.Tensor = torch.ops.aten.convolution(x, weight, None, *self._args())
        y = pad_dims(y, list(self.pads))
        return y if bias is None else y + bias.view(-1, *[1] * len(self.stride))

    def input_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._gradients(dy, x, weight, [True, False, False])[0]

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._gradients(dy, x, weight, [False, True, False])[1]

    def _gradients(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not x.numel() or not weight.numel():
            return torch.zeros_like(x), torch.zeros_like(weight)
        written = unpad_dims(dy, list(self.pads))
        dx, dw, _ = torch.ops.aten.convolution_backward(written, x, weight, None, *self._args(), wanted)
        return dx, dw

    def _args(self) -> tuple[object, ...]:
        none = [0] * len(self.stride)
        return list(self.stride), none, list(self.dilation), True, none, self.groups


@dataclass(frozen=True)
class LocalTable:
    """The rows of an embedding's table that words name; `first` is the first word whose row is here."""

    words: int
    first: int
    padding: int | None

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        del bias  # tables have none
        if len(weight) == self.words:
            return torch.nn.functional.embedding(x, weight)
        # Raises torch's own error for words that no rank has.
        torch.nn.functional.embedding(x, weight.new_empty(1).expand(self.words, 1))
        rows, is_here = self._rows(x, weight)
        return torch.nn.functional.embedding(rows.where(is_here, 0), weight).where(is_here.unsqueeze(-1), 0)

    def input_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        del dy, weight
        return torch.zeros_like(x)

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, is_here = self._rows(x, weight)
        padding = -1 if self.padding is None else self.padding - self.first
        count = len(weight)
        padding = padding if 0 <= padding < count else -1
        backward: Any = torch.ops.aten.embedding_dense_backward
        gradient: torch.Tensor
        if count == self.words:
            gradient = backward(dy, x, count, padding, False)
            return gradient
        # One more row takes what belongs to other ranks.
        gradient = backward(dy, rows.where(is_here, count), count + 1, padding, False)
        return gradient[:count]

    def _rows(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x - self.first
        return rows, (rows >= 0) & (rows < len(weight))


@dataclass(frozen=True)
class LocalDense:
    """A dense layer on the last dim."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def input_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        del x
        return dy @ weight

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        del weight
        return dy.flatten(0, -2).T @ x.flatten(0, -2)
