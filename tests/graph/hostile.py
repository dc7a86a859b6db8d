"""Networks that do in `forward` what packages do, each in a way that a tracer may get wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


def conv(channels: int = 4) -> nn.Conv2d:
    return nn.Conv2d(channels, 4, 3, padding=1)


class InPlace(nn.Module):
    """Operators and methods that change their tensor, and writes into parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(), conv()

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        x += 1
        x.mul_(0.5).clamp_(min=-2.0)
        y = F.relu(x, inplace=True)
        y = y - 0.1
        z = self.second(y)
        z[:, :2] = z[:, :2] * 2
        z[..., 0] = 0.0
        return z


class Lists(nn.Module):
    """Features kept in lists and dicts that grow and shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv() for _ in range(3))

    def forward(self, x: Any) -> Any:
        kept: list[Any] = [x]
        named: dict[str, Any] = {}
        for index, layer in enumerate(self.layers):
            kept.append(layer(kept[-1]))
            named[f"{index}"] = kept[-1]
        last = kept.pop()
        kept.insert(0, last)
        kept.extend(named.values())
        del kept[1]
        named.update({"0": kept[0] + named["1"]})
        return torch.cat(kept[:2], 1) + torch.cat([named["0"], named["2"]], 1)


class AsksForTypes(nn.Module):
    """`torch.jit.isinstance`, as torchvision asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Any) -> Any:
        features = [x] if isinstance(x, torch.Tensor) else x
        if torch.jit.isinstance(features, list[torch.Tensor]):
            features = [torch.cat(features, 1)]
        return self.layer(features[0])


class NormAndAct(nn.BatchNorm2d):
    """timm's norm: a subclass with a forward of its own that calls the function and an activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: Any) -> Any:
        torch._assert(x.ndim == 4, "expected four dims")
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        is_training = self.training or (self.running_mean is None and self.running_var is None)
        statistics = self.running_mean, self.running_var
        made = F.batch_norm(x, *statistics, self.weight, self.bias, is_training, factor, self.eps)
        return self.act(made)


class ScaledConv(nn.Conv2d):
    """A convolution whose weight is standardised in forward."""

    def forward(self, x: Any) -> Any:
        weight = self.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Subclasses(nn.Module):
    """Subclasses of torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.scaled = conv(), NormAndAct(4), ScaledConv(4, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.scaled(self.norm(self.conv(x)))


@torch.fx.wrap
def shuffled(x: Any, groups: int) -> Any:
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class WrappedFunction(nn.Module):
    """A function that plain torch.fx would not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Any) -> Any:
        return shuffled(self.layer(x), 2)


class ShapeBranches(nn.Module):
    """Python that looks at sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = conv(), conv()

    def forward(self, x: Any) -> Any:
        n, c, h, w = x.size()
        y = self.layer(x) if h > 4 and c == 4 else self.other(x)
        if y.shape[-1] % 2 == 0 and len(y) == n:
            y = F.interpolate(y, size=(h // 2, w // 2), mode="nearest")
        return y if min(y.shape[2:]) < h else self.other(y)


class Supervised(nn.Module):
    """Deep supervision: a dict and a list of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.low = conv(), nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x: Any) -> Any:
        high = self.layer(x)
        low = self.low(high)
        return {"out": high, "aux": [low, F.interpolate(low, scale_factor=2.0)]}


class MakesBuffers(nn.Module):
    """Constants that are made, and kept, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.grid = conv(), None

    def forward(self, x: Any) -> Any:
        if self.grid is None or self.grid.shape[-1] != x.shape[-1]:
            rows = torch.linspace(-1, 1, x.shape[-2], dtype=x.dtype, device=x.device)
            columns = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
            self.grid = rows[:, None] + columns[None]  # type: ignore[assignment]
        return self.layer(x + self.grid) * torch.ones_like(x)


class Recomputes(nn.Module):
    """`torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(conv(), nn.ReLU(), conv())

    def forward(self, x: Any) -> Any:
        return checkpoint(self.layers, x, use_reentrant=False)


class Closed(nn.Module):
    """A branch on values: it cannot be captured, and runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Any) -> Any:
        return self.layer(x) * 2 if x.abs().max() > 0 else x


class WithClosed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.closed, self.last = conv(), Closed(), conv()

    def forward(self, x: Any) -> Any:
        return self.last(self.closed(self.first(x)))


class MixedTypes(nn.Module):
    """Weights of two types, with a cast between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv().float(), conv()

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x.float()).double())

    def double(self) -> MixedTypes:
        self.last.double()
        return self


class ComputesWeights(nn.Module):
    """A dense layer whose weight and bias are computed from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight, self.bias = conv(), nn.Linear(4, 20), nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        of_all = x.mean((0, 2, 3))
        return F.linear(self.layer(x).permute(0, 2, 3, 1), self.weight(of_all).view(5, 4), self.bias(of_all))


class NamesNoDevice(nn.Module):
    """Tensors that are made in forward, where the default device is the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Any) -> Any:
        y = self.layer(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1)
        y = y[:, :, torch.arange(y.shape[2] - 1, -1, -1)] / torch.tensor(y.shape[2:]).prod()
        return y @ torch.ones(y.shape[3], 3, dtype=y.dtype)


class SetsMasks(nn.Module):
    """One value where a mask says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv(), conv()

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        y[y > 0.5] = 0.5
        y[y.mean((1, 2, 3)) < 0] = -0.5
        return self.last(y)


class LooksAtTheBatch(nn.Module):
    """A value of the whole batch as a number: ranks with other samples must find the same."""

    def forward(self, x: Any) -> Any:
        return x / x.std().item()


class Fivefold(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: Any) -> Any:
        return gradient * 5


class Centres(nn.Module):
    """Cannot be captured, and takes the mean over samples."""

    def forward(self, x: Any) -> Any:
        return Fivefold.apply(x - x.mean(0, keepdim=True))


class Apart(nn.Module):
    """Cannot be captured, and looks at samples one by one."""

    def forward(self, x: Any) -> Any:
        return Fivefold.apply(x)


def around(part: nn.Module) -> nn.Module:
    return nn.Sequential(conv(), part, conv())


class Masked(nn.Module):
    """Torch's transformer with a mask of truths and one of tokens that do not count."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.mask = nn.Buffer(torch.ones(32, 32, dtype=torch.bool).triu(1))

    def forward(self, x: Any) -> Any:
        tokens = x.reshape(x.shape[0], 32, 8)
        padding = torch.arange(32) > 29
        return self.layers(tokens, mask=self.mask, src_key_padding_mask=padding.expand(len(x), -1))


class NormsAgain(nn.Module):
    """Batch norms in checkpoints of both forms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Sequential(conv(), nn.BatchNorm2d(4))

    def forward(self, x: Any) -> Any:
        y = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.last, y, use_reentrant=True)


def with_computed_weights() -> nn.Module:
    """Torch's parametrizations, and its weight_norm of before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(parametrizations.weight_norm(conv()), nn.ReLU(), nn.utils.weight_norm(conv()), conv())


class Hostile(NamedTuple):
    """A network, and whether the tracer is to tell that it leaves something closed."""

    make: Callable[[], nn.Module]
    says: str = ""
    strategy: str = ""
    """Under which it is tried; if empty, under one of them in turn."""


HOSTILE = {
    made.__name__: Hostile(made)
    for made in (
        InPlace, Lists, AsksForTypes, Subclasses, WrappedFunction, ShapeBranches, Supervised, MakesBuffers, MixedTypes,
    )
} | {
    "Recomputes": Hostile(Recomputes, "its calls are inlined"),
    "WithClosed": Hostile(WithClosed, "branches on the value of a tensor"),
    "ComputesWeights": Hostile(ComputesWeights, strategy="data"),
    "NamesNoDevice": Hostile(NamesNoDevice, strategy="spatial"),
    "SetsMasks": Hostile(SetsMasks, strategy="spatial"),
    "LooksAtTheBatch": Hostile(lambda: around(LooksAtTheBatch()), "on the whole batch on every rank", "data"),
    "Centres": Hostile(lambda: around(Centres()), "on the whole batch on every rank", "data"),
    "Apart": Hostile(lambda: around(Apart()), "of which only samples can be cut", "data"),
    "Masked": Hostile(Masked, "in training mode", "data"),
    "NormsAgain": Hostile(NormsAgain, "count a batch once", "data"),
    "with_computed_weights": Hostile(with_computed_weights, strategy="filter"),
}  # fmt: skip
