"""ConvLSTM for the next frames: Shi et al., "Convolutional LSTM Network: A Machine Learning Approach for Precipitation
Nowcasting", 2015, section 3.2 and the last row of table 1.

| stage | output of 10 frames of 64×64 | layers |
| --- | --- | --- |
| patches | 10 × 16×16×16 | squares of 4×4 pixels as channels |
| encoder | states of 128, 64 and 64 channels | three layers of 5×5, one step for each frame |
| forecaster | 10 × 256×16×16 | layers like them, from the top, started from the encoder's states, without input |
| head | 10×64×64 | 1×1 over the states of all layers, squares as pixels |

Gates look at the cell through one weight a channel. The four gates of a channel are neighbours among the filters, so
that ranks with a part of the filters have all gates of their channels. The output is the logit of each pixel.
"""

from __future__ import annotations

import torch
from torch import nn

from convmesh.models.blocks import stages

State = tuple[torch.Tensor, torch.Tensor]
GATES = 4


class ConvCell(nn.Module):
    """One time step: gates are convolutions of the input, if there is one, and of the last state."""

    def __init__(self, channels: int, filters: int, kernel: int) -> None:
        super().__init__()
        self.given = nn.Conv2d(channels, GATES * filters, kernel, padding=kernel // 2, bias=False) if channels else None
        self.recalled = nn.Conv2d(filters, GATES * filters, kernel, padding=kernel // 2)
        self.peepholes = nn.Parameter(torch.zeros(GATES - 1, filters, 1, 1))
        self.filters = filters

    def reset_parameters(self) -> None:
        """Reset what belongs to no layer: gates begin without a look at the cell."""
        nn.init.zeros_(self.peepholes)

    def forward(self, x: torch.Tensor | None, state: State) -> State:
        hidden, cell = state
        gates = self.recalled(hidden) if self.given is None or x is None else self.recalled(hidden) + self.given(x)
        i, f, g, o = gates.unflatten(1, (self.filters, GATES)).unbind(2)
        kept = torch.sigmoid(f + self.peepholes[1] * cell) * cell
        cell = kept + torch.sigmoid(i + self.peepholes[0] * cell) * torch.tanh(g)
        return torch.sigmoid(o + self.peepholes[2] * cell) * torch.tanh(cell), cell


class Encoder(nn.Module):
    """Reads frames one by one; only the last states count."""

    def __init__(self, channels: int, filters: tuple[int, ...], kernel: int, frames: int) -> None:
        super().__init__()
        given = (channels, *filters)
        self.cells = nn.ModuleList(ConvCell(c, f, kernel) for c, f in zip(given, filters, strict=False))
        self.frames = frames

    def forward(self, squares: torch.Tensor) -> list[State]:
        """`squares` is (samples, frames, channels, height, width)."""
        states = [self._none(squares, cell.filters) for cell in self.cells]  # type: ignore[arg-type]
        for time in range(self.frames):
            x = squares[:, time]
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, states[layer])
                x = states[layer][0]
        return states

    def _none(self, squares: torch.Tensor, filters: int) -> State:
        none = torch.zeros_like(squares[:, 0, :1]).expand(-1, filters, -1, -1)
        return none, none


class Forecaster(nn.Module):
    """Continues from the encoder's states, one step for each frame to come, and returns the states of all layers."""

    def __init__(self, filters: tuple[int, ...], kernel: int, frames: int) -> None:
        super().__init__()
        down = filters[::-1]
        self.cells = nn.ModuleList(ConvCell(c, f, kernel) for c, f in zip((0, *down), down, strict=False))
        self.frames = frames

    def forward(self, states: list[State]) -> list[torch.Tensor]:
        states, shown = states[::-1], []
        for _ in range(self.frames):
            x = None
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, states[layer])
                x = states[layer][0]
            shown.append(torch.cat([hidden for hidden, _ in states], 1))
        return shown


class Squares(nn.Module):
    """Squares of pixels of each frame as its channels: (samples, frames, channels, height, width)."""

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.patch = patch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pixel_unshuffle(x.unsqueeze(2), self.patch)


class Frames(nn.Module):
    """A pixel's logit from the states of all layers: (samples, frames, height, width)."""

    def __init__(self, channels: int, patch: int) -> None:
        super().__init__()
        self.mix, self.patch = nn.Conv2d(channels, patch * patch, 1), patch

    def forward(self, shown: list[torch.Tensor]) -> torch.Tensor:
        frames = [torch.nn.functional.pixel_shuffle(self.mix(states), self.patch) for states in shown]
        return torch.cat(frames, 1)


def convlstm(
    frames: int = 10, predicted: int = 10, patch: int = 4, filters: tuple[int, ...] = (128, 64, 64), kernel: int = 5
) -> nn.Sequential:
    """`frames` frames in, the logits of the `predicted` frames after them out."""
    return stages(
        patches=Squares(patch),
        encoder=Encoder(patch * patch, filters, kernel, frames),
        forecaster=Forecaster(filters, kernel, predicted),
        head=Frames(sum(filters), patch),
    )
