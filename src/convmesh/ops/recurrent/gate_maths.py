"""What one time step does with the gates of hidden units, and its gradients: LSTM, GRU and plain RNN.

Units do not see each other here, so a rank that has some of them needs nothing from the others. `given` and `recalled`
are what the input and the previous hidden state contribute to the gates: (…, gates · units), gate by gate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

Kept = tuple[torch.Tensor, ...]
_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward
_threshold_backward = torch.ops.aten.threshold_backward


class Stepped(NamedTuple):
    """The units after a step: what they show, their cell state if they have one, and what backward will read."""

    hidden: torch.Tensor
    cell: torch.Tensor | None
    kept: Kept


class Returned(NamedTuple):
    """Gradients before a step; `hidden` is the part that does not come through the gates."""

    given: torch.Tensor
    recalled: torch.Tensor
    hidden: torch.Tensor | None
    cell: torch.Tensor | None


class GateMaths(ABC):
    """One kind of unit."""

    gates: ClassVar[int]
    has_cell: ClassVar[bool] = False

    @abstractmethod
    def step(
        self, given: torch.Tensor, recalled: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None
    ) -> Stepped: ...

    @abstractmethod
    def back(self, kept: Kept, hidden: torch.Tensor, cell: torch.Tensor | None) -> Returned:
        """The gradients before a step, from those after it."""


class LstmMaths(GateMaths):
    """Input, forget, candidate and output gates."""

    gates = 4
    has_cell = True

    def step(
        self, given: torch.Tensor, recalled: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None
    ) -> Stepped:
        del hidden
        assert cell is not None
        i, f, g, o = (given + recalled).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        after = torch.addcmul(f * cell, i, g)
        shown = after.tanh()
        return Stepped(o * shown, after, (i, f, g, o, cell, shown))

    def back(self, kept: Kept, hidden: torch.Tensor, cell: torch.Tensor | None) -> Returned:
        i, f, g, o, before, shown = kept
        after = _tanh_backward(hidden * o, shown)
        after = after if cell is None else after + cell
        gates = torch.cat(
            [
                _sigmoid_backward(after * g, i),
                _sigmoid_backward(after * before, f),
                _tanh_backward(after * i, g),
                _sigmoid_backward(hidden * shown, o),
            ],
            -1,
        )
        return Returned(gates, gates, None, after * f)


class GruMaths(GateMaths):
    """Reset, update and candidate gates; the reset gate acts on the hidden state's contribution."""

    gates = 3

    def step(
        self, given: torch.Tensor, recalled: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None
    ) -> Stepped:
        del cell
        xr, xz, xn = given.chunk(3, -1)
        hr, hz, hn = recalled.chunk(3, -1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = torch.addcmul(xn, r, hn).tanh()
        return Stepped(torch.addcmul(n, z, hidden - n), None, (r, z, n, hn, hidden))

    def back(self, kept: Kept, hidden: torch.Tensor, cell: torch.Tensor | None) -> Returned:
        del cell
        r, z, n, hn, before = kept
        direct = hidden * z
        dn = _tanh_backward(hidden - direct, n)
        dr, dz = _sigmoid_backward(dn * hn, r), _sigmoid_backward(hidden * (before - n), z)
        return Returned(torch.cat([dr, dz, dn], -1), torch.cat([dr, dz, dn * r], -1), direct, None)


class TanhMaths(GateMaths):
    """One sum, through tanh."""

    gates = 1

    def step(
        self, given: torch.Tensor, recalled: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None
    ) -> Stepped:
        del hidden, cell
        made = self._shown(given + recalled)
        return Stepped(made, None, (made,))

    def back(self, kept: Kept, hidden: torch.Tensor, cell: torch.Tensor | None) -> Returned:
        del cell
        summed = self._returned(hidden, kept[0])
        return Returned(summed, summed, None, None)

    def _shown(self, summed: torch.Tensor) -> torch.Tensor:
        return summed.tanh()

    def _returned(self, grad: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = _tanh_backward(grad, made)
        return gradient


class ReluMaths(TanhMaths):
    """One sum, through relu."""

    def _shown(self, summed: torch.Tensor) -> torch.Tensor:
        return summed.relu()

    def _returned(self, grad: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = _threshold_backward(grad, made, 0)
        return gradient


MATHS: dict[str, GateMaths] = {
    "lstm": LstmMaths(),
    "gru": GruMaths(),
    "rnn_tanh": TanhMaths(),
    "rnn_relu": ReluMaths(),
}
"""By the name of torch's function, without `_cell`."""
