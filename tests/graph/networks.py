"""Small networks, one for each habit that captured models have."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    """Skips, in-place sums and activations, and dropout that reads the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.add = nn.Conv2d(8, 8, 1)  # a module called like a function

    def forward(self, x: Any) -> Any:
        x = self.enter(x)
        skip = x
        y = torch.relu_(self.norm(x) * 2) * 3
        y += self.add(skip)
        y.mul_(0.5)
        return F.dropout(F.relu(y + skip, inplace=True), 0.5, training=self.training)


class Branches(nn.Module):
    """Modules in lists and dicts, concatenation, a split and its unpacking, means and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.arms = nn.ModuleList(nn.Conv2d(3, width, 3, padding="same") for width in (2, 4))
        self.ends = nn.ModuleDict({"pool": nn.AdaptiveAvgPool2d(1), "dense": nn.Linear(6, 5)})

    def forward(self, x: Any) -> Any:
        joined = torch.cat([arm(x) for arm in self.arms], dim=1)
        left, right = joined.chunk(2, 1)
        scaled = self.ends["pool"](joined) + torch.cat([left, right], 1).mean((2, 3), keepdim=True)
        return self.ends["dense"](scaled.view(scaled.size(0), -1))


class Shared(nn.Module):
    """A block, a module and a parameter that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())
        self.gamma = nn.Parameter(torch.full((3, 1, 1), 0.7))
        self.shift = nn.Buffer(torch.arange(3.0))
        self.tied = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.tied.weight

    def forward(self, x: Any) -> Any:
        x = self.block(self.block(x)) * self.gamma + self.shift.view(1, -1, 1, 1)
        pooled = (x * self.gamma).flatten(2).mean(-1)
        return self.other(self.tied(pooled))


class Several(nn.Module):
    """Several inputs, arguments with defaults, and outputs in a dict, a list and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.extra = nn.Conv2d(3, 4, 1), nn.Linear(4, 4)

    def forward(self, x: Any, y: Any, scale: float = 2.0, mask: Any = None) -> Any:
        image = self.image(x) * scale
        extra = self.extra(y)
        if mask is not None:
            image = image * mask
        return {"image": image, "pair": (extra, [image.sum((2, 3)) + extra])}


class Shapes(nn.Module):
    """Shape arithmetic, control flow on shapes, loops over them, and tensors made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 2, stride=2), nn.Conv2d(4, 3, 1)

    def forward(self, x: Any) -> Any:
        assert x.dim() == 4, f"got {x.shape}"
        n, _, height, width = x.shape
        y = self.up(self.down(x))
        y = F.interpolate(y, size=x.shape[2:])
        if height > 4 and isinstance(x, torch.Tensor):
            y = F.pad(y, [0, width % 2, 0, height % 2])[:, :, :height, :width]
        for row in range(min(2, x.shape[2])):
            y = y + x[:, :, row : row + 1] / math.sqrt(width * y.size(-1))
        ramp = torch.arange(n, dtype=x.dtype, device=x.device) + torch.zeros(n, dtype=x.dtype)
        y = y + torch.ones(x.shape[0], 1, 1, 1, dtype=x.dtype).cumsum(0)
        return y * ramp.view(-1, 1, 1, 1) + torch.tensor(float(len(y.shape)), dtype=x.dtype)


class Norms(nn.Module):
    """Weights computed from others: weight and spectral norms, of torch.nn modules and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1))
        self.dense = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.own = parametrizations.weight_norm(Scale(4))

    def forward(self, x: Any) -> Any:
        return self.own(self.dense(self.conv(x).amax((2, 3))))


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))

    def forward(self, x: Any) -> Any:
        return x @ self.weight


class Checkpointed(nn.Module):
    """Activation checkpointing inside the model, of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Any) -> Any:
        y = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self._rest, y, use_reentrant=True)

    def _rest(self, y: Any) -> Any:
        return torch.sigmoid(self.second(y))


class Gate(nn.Module):
    """Branches on data: the path is unknown until it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Any) -> Any:
        if x.sum() > 0:
            return self.conv(x)
        return self.conv(x) * 2


class Gated(nn.Module):
    """A visible network around a part that cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gates, self.leave = nn.Conv2d(3, 4, 3), nn.ModuleList([Gate(), Gate()]), nn.Conv2d(4, 2, 1)

    def forward(self, x: Any) -> Any:
        x = self.enter(x)
        for gate in self.gates:
            x = gate(x)
        return self.leave(x)


class Frozen(nn.Module):
    """Gradients switched off in a part, which a graph would forget."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = Features(), nn.Conv2d(4, 2, 1)

    def forward(self, x: Any) -> Any:
        return self.head(self.features(x))


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.scale, self.seen = nn.Parameter(torch.tensor(1.5)), nn.Buffer(torch.zeros(4))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.conv(x) * self.scale
            self.seen.mul_(0.9).add_(y.mean((0, 2, 3)) * self.scale)
        return y * 2 + self.conv(x) * self.seen.view(-1, 1, 1)


class Dense(nn.Module):
    """Growing lists of features, type queries, and item assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 2 * i, 2, 3, padding=1) for i in range(3))

    def forward(self, x: Any) -> Any:
        features = [x] if isinstance(x, torch.Tensor) else x
        for layer in self.layers:
            features.append(F.gelu(layer(torch.cat(features, 1))))
        y = torch.stack(features[1:]).sum(0).clone()
        y[:, 0] = 0.5
        return y


class Functional(nn.Module):
    """Every layer as a function call, with its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.bias = nn.Parameter(torch.randn(4))
        self.mean, self.var = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(4))

    def forward(self, x: Any) -> Any:
        y = F.conv2d(x, self.kernel, self.bias, stride=2, padding=(1, 0))
        y = F.batch_norm(y, self.mean, self.var, training=self.training)
        y = F.max_pool2d(F.leaky_relu(y, 0.2), 2)
        return F.log_softmax(F.adaptive_avg_pool2d(y, 1).flatten(1), dim=1)


def clipped(extents: Sequence[int], window: list[int]) -> list[int]:
    """Changes the list that it is given, as torchvision's swin transformers do."""
    for dim, extent in enumerate(extents):
        window[dim] = min(window[dim], extent)
    return window


fx.wrap("clipped")


class Wrapped(nn.Module):
    """A function that is recorded as one call, and a question that only torch.jit asks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.window = nn.Conv2d(3, 4, 1), [4, 9]

    def forward(self, x: Any) -> Any:
        if not torch.jit.isinstance(x, torch.Tensor) or torch.jit.isinstance([x], list[int]):
            raise TypeError("x must be a tensor")
        height, width = clipped((x.shape[2], x.shape[3]), list(self.window))
        return self.conv(x)[:, :, :height, :width]


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    notices: tuple[str, ...] = ()
    """What capturing it tells the user."""


NETWORKS = {
    "residual": Network(Residual, ((4, 3, 8, 7),)),
    "branches": Network(Branches, ((4, 3, 8, 7),)),
    "shared": Network(Shared, ((4, 3, 5, 5),)),
    "several": Network(Several, ((4, 3, 5, 5), (4, 4))),
    "shapes": Network(Shapes, ((4, 3, 9, 7),)),
    "norms": Network(Norms, ((4, 3, 6, 6),)),
    "checkpointed": Network(Checkpointed, ((2, 3, 8, 8),), ("checkpointing",)),
    "gated": Network(Gated, ((4, 3, 6, 6),), ("`gates.0` stays closed", "`gates.1` stays closed")),
    "frozen": Network(Frozen, ((4, 3, 6, 6),)),
    "dense": Network(Dense, ((4, 3, 6, 6),)),
    "wrapped": Network(Wrapped, ((4, 3, 6, 6),)),
    "functional": Network(Functional, ((4, 3, 9, 9),)),
    "sequential": Network(
        lambda: nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1, padding_mode="circular"), nn.GroupNorm(2, 4), nn.PReLU(), nn.MaxPool3d(2),
            nn.ConvTranspose3d(4, 2, 2, stride=2), nn.Dropout3d(0.3), nn.Flatten(), nn.Linear(2 * 4**3, 3),
        ),
        ((2, 1, 4, 4, 4),),
    ),
}  # fmt: skip
