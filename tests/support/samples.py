"""A sample call of every torch function that has a split version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from convmesh import Sharded, replicated
from convmesh.dist import OpenMesh
from convmesh.ops import manual_seed

EXTENTS = {"N": 3, "C": 8, "D": 6, "H": 4, "W": 10}
LABELS = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


@dataclass(frozen=True)
class Sample:
    """A call on inputs whose dims are named by `labels`, and on whole parameters."""

    call: Callable[..., Any]
    labels: tuple[str, ...] = ("NCDHW",)
    params: tuple[tuple[int, ...], ...] = ()
    classes: bool = False
    """Whether the last input holds class indices."""
    takes_mesh: bool = False
    """Whether the call has the mesh as its argument `mesh`."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(EXTENTS[label] for label in labels) for labels in self.labels]


def sample_of(name: str) -> Sample | None:
    """The sample call of a function by its name, or None where there is none."""
    if name in SAMPLES:
        return SAMPLES[name]
    return Sample(_function(name)) if name in UNARY else None


def _function(name: str) -> Callable[..., Any]:
    """The function of torch or torch.nn.functional called `name`, else the tensor's method."""
    found = getattr(F, name, None) or getattr(torch, name, None)
    return found if callable(found) else lambda x, *others: getattr(x, name)(*others)


UNARY = frozenset(
    (
        "abs", "amax", "amin", "argmax", "argmin", "bfloat16", "bool", "ceil", "celu", "clone", "contiguous", "cos",
        "count_nonzero", "double", "elu", "erf", "exp", "float", "floor", "gelu", "half", "hardshrink", "hardsigmoid",
        "hardswish", "hardtanh", "int", "isfinite", "isnan", "leaky_relu", "long", "max", "mean", "min", "mish", "neg",
        "norm", "ones_like", "relu", "relu6", "round", "selu", "sigmoid", "sign", "silu", "sin", "softplus",
        "softshrink", "softsign", "square", "std", "std_mean", "sum", "tanh", "tanhshrink", "var", "var_mean",
        "zeros_like", "absolute", "asinh", "atan", "cosh", "deg2rad", "erfc", "exp2", "expm1", "frac", "isinf",
        "nan_to_num", "negative", "positive", "sinc", "sinh", "tan", "trunc",
    )
)  # fmt: skip
"""Functions whose sample is a call with nothing but the tensor."""


def _on_each_dim(call: Callable[[Any, int], Any]) -> Sample:
    return Sample(lambda x: [call(x, dim) for dim in range(x.dim())])


def _pieces_of_each_dim(call: Callable[[Any, int], Sequence[Any]]) -> Sample:
    return Sample(lambda x: [piece for dim in range(x.dim()) for piece in call(x, dim)])


def _of_positive(call: Callable[..., Any]) -> Sample:
    return Sample(lambda x: call(x * x + 0.5))


def _of_two(call: Callable[..., Any]) -> Sample:
    return Sample(call, ("NCDHW", "NCDHW"))


def _of_each_dim(call: Callable[..., Any]) -> Sample:
    return _on_each_dim(lambda x, dim: call(x, dim=dim))


def _of_bits(name: str) -> Callable[..., Any]:
    return lambda x, y: getattr(torch, name)(x > 0, y > 0)


def _multiplied(x: Any, y: Any, weight: torch.Tensor) -> list[Any]:
    """With a weight, and of two tensors: by columns, by rows, with fewer dims, with vectors."""
    vector = y[0, 0, 0, 0]
    return [x @ weight, x @ y.mT, x.mT @ y, x @ y[0].mT, y[0, 0, 0] @ x.mT, x @ vector, vector @ x.mT]


def _attended(x: Any, y: Any) -> list[Any]:
    """Plain, with masks of numbers and of truth, causal, and with fewer heads of keys."""
    attend = F.scaled_dot_product_attention
    seen = (y @ y.mT > -3) | torch.eye(y.shape[-2], dtype=torch.bool)
    return [
        attend(x, y, y), attend(x, y, x * y, attn_mask=y @ x.mT, scale=0.3), attend(x, y, y, attn_mask=seen),
        attend(x, x, y, is_causal=True), attend(x.movedim(2, 3), y.movedim(2, 3), y.movedim(2, 3), is_causal=True),
        attend(x[0], y[0, :, :3], y[0, :, :3], enable_gqa=True),
    ]  # fmt: skip


def _by_heads(x: Any, y: Any, weight: torch.Tensor, bias: torch.Tensor, last: torch.Tensor) -> list[Any]:
    """Of one tensor, of two, and with the weights of the attention."""
    settings: tuple[Any, ...] = (C, 2, weight, bias, None, None, False, 0.0, last, None)
    attend: Any = F.multi_head_attention_forward
    hidden = torch.ones(4, 10, dtype=torch.bool).triu(5)
    return [
        attend(x, x, x, *settings, need_weights=False)[0],
        *attend(x, y, y, *settings, attn_mask=hidden),
        attend(x[:, 0], y[:, 0], y[:, 0], *settings)[0],
    ]


def _set(x: Any) -> Any:
    y = x * 1
    y[:, 1:3, ..., 0] = 2.0
    y[1] = x[0] * 3
    return y


def _masked(call: Callable[..., Any], dims: int) -> Sample:
    """Dropout: one device takes the masks of the split operator, which depend on the global index alone."""

    def run(x: Any, mesh: OpenMesh) -> Any:
        manual_seed(mesh, 1)
        return call(x, 0.5, True) if isinstance(x, Sharded) else call(replicated(x, mesh), 0.5, True).local

    return Sample(run, (LABELS[dims],), takes_mesh=True)


def _drawn_like(call: Callable[..., Any]) -> Sample:
    """Random numbers: one device takes those of the split operator, which depend on the global index alone."""

    def run(x: Any, mesh: OpenMesh) -> Any:
        manual_seed(mesh, 1)
        return x * (call(x.detach()) if isinstance(x, Sharded) else call(replicated(x.detach(), mesh)).local)

    return Sample(run, takes_mesh=True)


def _of_complex(call: Callable[[Any], Any]) -> Sample:
    """Of complex numbers; its result as real ones, which can be compared."""

    def run(x: Any, y: Any) -> Any:
        made = call(torch.complex(x, y))
        return torch.view_as_real(torch.resolve_conj(made)) if made.is_complex() else made

    return _of_two(run)


def _as_pairs(call: Callable[[Any], Any]) -> Sample:
    return Sample(lambda x: torch.view_as_real(torch.resolve_conj(call(x))))


def _read_in_time(name: str) -> Sample:
    """A recurrent layer, or one step of it, over (samples, time, features)."""
    gates, is_cell = {"lstm": 4, "gru": 3}.get(name.partition("_")[0], 1), name.endswith("_cell")
    weights = ((gates * 2, C), (gates * 2, 2), (gates * 2,), (gates * 2,))

    def run(x: Any, *weights: Any) -> Any:
        begun = x.new_zeros((3, 2) if is_cell else (1, 3, 2))
        states = (begun, begun) if name.startswith("lstm") else begun
        if is_cell:
            return getattr(torch, name)(x, states, *weights)
        return getattr(torch, name)(x, states, weights, True, 1, 0.0, False, False, True)

    return Sample(run, ("NC" if is_cell else "NHC",), weights)


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_SPECTRAL = ("fft", "ifft", "hfft", "irfft", "fft2", "ifft2", "irfft2", "fftn", "ifftn", "irfftn")


def _windows(dims: int) -> dict[str, Sample]:
    """Poolings, unpooling and convolutions of one to three spatial dims."""
    labels, channels, kernel = (LABELS[dims],), EXTENTS["C"], (3,) * dims
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")
    calls: dict[str, Callable[..., Any]] = {
        "max_pool": partial(pool, kernel_size=3, stride=2, padding=1),
        "avg_pool": partial(getattr(F, f"avg_pool{dims}d"), kernel_size=3, stride=2, padding=1),
        "lp_pool": partial(getattr(F, f"lp_pool{dims}d"), norm_type=2.0, kernel_size=3, stride=2),
        "adaptive_avg_pool": partial(getattr(F, f"adaptive_avg_pool{dims}d"), output_size=3),
        "adaptive_max_pool": partial(getattr(F, f"adaptive_max_pool{dims}d"), output_size=3),
        "max_unpool": lambda x: unpool(*pool(x, 2, return_indices=True), 2),
    }
    samples = {f"{name}{dims}d": Sample(call, labels) for name, call in calls.items()}
    for name, options in (("max_pool", {"kernel_size": 3}), ("adaptive_max_pool", {"output_size": 3})):
        found = f"{name}{dims}d_with_indices"
        samples[found] = Sample(partial(getattr(F, found), **options), labels)
    conv, transposed = getattr(F, f"conv{dims}d"), getattr(F, f"conv_transpose{dims}d")
    weight = (channels, channels, *kernel)
    samples[f"conv{dims}d"] = Sample(partial(conv, stride=2, padding=1), labels, (weight, (channels,)))
    samples[f"conv_transpose{dims}d"] = Sample(partial(transposed, stride=2), labels, (weight, (channels,)))
    return samples


TWO_TENSORS = (
    "add", "atan2", "binary_cross_entropy_with_logits", "div", "eq", "ge", "gt", "huber_loss", "l1_loss", "le", "lt",
    "maximum", "minimum", "mse_loss", "mul", "ne", "reshape_as", "smooth_l1_loss", "sub", "view_as", "copysign",
    "divide", "expand_as", "fmax", "fmin", "greater", "hypot", "less", "logaddexp", "multiply", "rsub", "subtract",
    "true_divide",
)  # fmt: skip

C, W = EXTENTS["C"], EXTENTS["W"]

SAMPLES: dict[str, Sample] = {
    **{name: sample for dims in LABELS for name, sample in _windows(dims).items()},
    **{name: _of_two(_function(name)) for name in TWO_TENSORS},
    **{name: _masked(getattr(F, name), 3) for name in ("dropout", "alpha_dropout", "feature_alpha_dropout")},
    **{f"dropout{dims}d": _masked(getattr(F, f"dropout{dims}d"), dims) for dims in LABELS},
    **{
        name: _of_positive(getattr(torch, name))
        for name in ("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal")
    },
    "acos": Sample(lambda x: torch.acos(x.tanh() * 0.9)),
    "asin": Sample(lambda x: torch.asin(x.tanh() * 0.9)),
    **{name: _of_two(_of_bits(name)) for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "logical_xor")},
    **{name: _of_each_dim(getattr(torch, name)) for name in ("cumsum", "cumprod", "logcumsumexp", "argsort")},
    **{name: _pieces_of_each_dim(getattr(torch, name)) for name in ("cummax", "cummin", "sort")},
    "tril": Sample(lambda x: [torch.tril(x), torch.tril(x, 2)]),
    "triu": Sample(lambda x: torch.triu(x, -1)),
    "glu": _on_each_dim(lambda x, dim: F.glu(torch.cat([x, x * 2], dim), dim)),
    "cosine_similarity": _of_two(lambda x, y: [F.cosine_similarity(x, y, dim) for dim in range(5)]),
    "bitwise_not": Sample(lambda x: torch.bitwise_not(x > 0)),
    "diff": _on_each_dim(lambda x, dim: torch.diff(x, dim=dim)),
    "topk": _pieces_of_each_dim(lambda x, dim: torch.topk(x, 2, dim)),
    "full_like": Sample(lambda x: torch.full_like(x, 2.0)),
    "empty_like": Sample(lambda x: torch.ones_like(torch.empty_like(x))),
    "floor_divide": _of_two(lambda x, y: torch.floor_divide(x.detach(), y.detach())),
    "remainder": _of_two(lambda x, y: torch.remainder(x, y * y + 0.5)),
    "xlogy": _of_two(lambda x, y: torch.xlogy(x, y * y + 0.5)),
    "float_power": _of_two(lambda x, y: torch.float_power(x * x + 0.5, y)),
    "addcmul": _of_two(lambda x, y: torch.addcmul(x, y, x[:1], value=0.5)),
    "addcdiv": _of_two(lambda x, y: torch.addcdiv(x, y, x * x + 0.5, value=0.5)),
    "lerp": _of_two(lambda x, y: [torch.lerp(x, y, 0.3), torch.lerp(x, y, y[:1])]),
    "masked_fill": _of_two(lambda x, y: [x.masked_fill(y > 0, 2.0), x.masked_fill(y[:1] > 0, -torch.inf)]),
    "expand": Sample(lambda x: [x[:, None].expand(-1, 2, -1, -1, -1, -1), x[:1].expand(3, -1, -1, -1, -1)]),
    "broadcast_to": Sample(lambda x: torch.broadcast_to(x, (2, *x.shape))),
    "broadcast_tensors": _of_two(lambda x, y: torch.broadcast_tensors(x, y[:1])),
    "repeat": Sample(lambda x: [x.repeat(1, 2, 1, 1, 1), x.repeat(2, 1, 1, 2, 1, 3)]),
    "tile": Sample(lambda x: torch.tile(x, (2, 3))),
    "repeat_interleave": _on_each_dim(lambda x, dim: x.repeat_interleave(3, dim)),
    "unfold": Sample(lambda x: F.unfold(x, 3, padding=1, stride=2), ("NCHW",)),
    "fold": Sample(lambda x: F.fold(F.unfold(x, 2), (4, 10), 2), ("NCHW",)),
    "index_select": _on_each_dim(lambda x, dim: x.index_select(dim, torch.tensor([2, 0, 2]))),
    "gather": _of_two(lambda x, y: [torch.gather(x, dim, (y > 0).long()) for dim in range(5)]),
    "take_along_dim": _of_two(lambda x, y: torch.take_along_dim(x, (y > 0).long(), 1)),
    "scatter": _of_two(lambda x, y: [torch.scatter(x, dim, (y < 9).long(), 2.0) for dim in range(5)]),
    "scatter_add": _of_two(lambda x, y: [torch.scatter_add(x, dim, (y > 0).long(), y) for dim in range(5)]),
    "embedding": Sample(F.embedding, ("NCH",), ((C, 5),), classes=True),
    "grid_sample": Sample(
        lambda x, y: F.grid_sample(x, y.narrow(1, 0, 2).movedim(1, -1).tanh(), align_corners=False), ("NCHW", "NCHW")
    ),
    "histc": Sample(lambda x: torch.histc(x.detach(), 5, -1, 1.5)),
    "one_hot": Sample(lambda x: F.one_hot(x, C), ("NCH",), classes=True),
    "tensordot": _of_two(
        lambda x, y: [
            torch.tensordot(x[0, 0], y[0, 0].movedim(-1, 0), 1),
            torch.tensordot(x, y, ([0, 1, 2], [0, 1, 2])),
            torch.tensordot(x[0, 0], y[0], ([1, 2], [2, 3])),
        ]
    ),
    "affine_grid": Sample(
        lambda x: F.affine_grid(x.narrow(1, 0, 2).narrow(2, 0, 3), [3, 1, 4, 5], align_corners=False), ("NCH",)
    ),
    "mm": Sample(lambda x, w: [torch.mm(x, w), torch.mm(x, x.t()), torch.mm(x.t(), x)], ("NC",), ((C, 5),)),
    "spmm": Sample(torch.mm, ("NC",), ((C, 5),)),
    "addmm": Sample(lambda x, b: torch.addmm(b, x, x.t(), beta=2, alpha=3), ("NC",), ((3,),)),
    "outer": Sample(lambda x: torch.outer(x, x * 2), ("W",)),
    "bmm": _of_two(lambda x, y: [torch.bmm(x[0, 0], y[0, 0].mT), torch.bmm(x[:, 0, 0].mT, y[:, 0, 0])]),
    "baddbmm": _of_two(lambda x, y: torch.baddbmm(x[:, 0, 0, :, :4], x[:, 0, 0], y[:, 0, 0].mT, beta=2, alpha=3)),
    "einsum": _of_two(
        lambda x, y: [
            torch.einsum("ncdhw,ncdkw->nchk", x, y),
            torch.einsum("ncdhw,ncdhw->nh", x, y),
            torch.einsum("...hw,...kw->...hk", x, y[0]),
            torch.einsum("nc...,mc...->nm", x, y),
        ]
    ),
    "scaled_dot_product_attention": _of_two(_attended),
    "multi_head_attention_forward": Sample(_by_heads, ("HNC", "WNC"), ((3 * C, C), (3 * C,), (C, C))),
    "setitem": Sample(_set),
    "logsigmoid": Sample(F.logsigmoid),
    "threshold": Sample(lambda x: F.threshold(x, 0.1, 0.0)),
    **{name: _drawn_like(getattr(torch, name)) for name in ("rand_like", "randn_like")},
    "bernoulli": _drawn_like(lambda x: torch.bernoulli(x.sigmoid())),
    "normal_": _drawn_like(lambda x: (x * 1).normal_(2.0, 3.0)),
    "uniform_": _drawn_like(lambda x: (x * 1).uniform_(-1.0, 2.0)),
    "copy_": _of_two(lambda x, y: (x * 1).copy_(y[:1])),
    "fill_": Sample(lambda x: (x * 1).fill_(2.0)),
    "zero_": Sample(lambda x: (x * 1).zero_()),
    "new_zeros": Sample(lambda x: x + x.new_zeros(x.shape[1:])),
    "new_ones": Sample(lambda x: x + x.new_ones(3, 1, 1, 1, 1)),
    "new_full": Sample(lambda x: x + x.new_full((), 2.0)),
    "new_empty": Sample(lambda x: x + x.new_empty(1).fill_(2.0)),
    "new_tensor": Sample(lambda x: x + x.new_tensor([2.0])),
    "prelu": Sample(F.prelu, params=((C,),)),
    "clamp": Sample(lambda x: torch.clamp(x, -1, 1)),
    "clip": Sample(lambda x: torch.clip(x, -1, 1)),
    "pow": Sample(lambda x: x**2),
    "fmod": Sample(lambda x: torch.fmod(x, 1.0)),
    "to": Sample(lambda x: x.to(torch.float32)),
    "type_as": Sample(lambda x: x.type_as(torch.zeros(1, dtype=torch.float32))),
    "where": _of_two(lambda x, y: torch.where(x > y, x, y)),
    "logical_and": _of_two(lambda x, y: torch.logical_and(x > 0, y > 0)),
    "logical_or": _of_two(lambda x, y: torch.logical_or(x > 0, y > 0)),
    "logical_not": Sample(lambda x: torch.logical_not(x > 0)),
    "all": Sample(lambda x: [(x < 5).all(), *((x > 0).all(dim) for dim in range(x.dim()))]),
    "any": Sample(lambda x: [(x > 5).any(), *((x > 0).any(dim) for dim in range(x.dim()))]),
    "prod": _on_each_dim(torch.prod),
    "linalg.vector_norm": Sample(torch.linalg.vector_norm),
    "logsumexp": _on_each_dim(torch.logsumexp),
    "softmax": _on_each_dim(torch.softmax),
    "log_softmax": _on_each_dim(torch.log_softmax),
    "softmin": _on_each_dim(F.softmin),
    "special.softmax": _on_each_dim(torch.special.softmax),
    "special.log_softmax": _on_each_dim(torch.special.log_softmax),
    "special.logsumexp": _on_each_dim(torch.special.logsumexp),
    "linear": Sample(F.linear, params=((5, W), (5,))),
    "matmul": Sample(_multiplied, ("NCDHW", "NCDHW"), ((W, 5),)),
    "batch_norm": Sample(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), params=((C,), (C,))),
    "group_norm": Sample(lambda x, w, b: F.group_norm(x, 4, w, b), params=((C,), (C,))),
    "instance_norm": Sample(lambda x, w, b: F.instance_norm(x, weight=w, bias=b), params=((C,), (C,))),
    "layer_norm": Sample(lambda x: F.layer_norm(x, x.shape[1:])),
    "rms_norm": Sample(lambda x: F.rms_norm(x, x.shape[1:], eps=1e-5)),
    "local_response_norm": Sample(lambda x: F.local_response_norm(x, 3)),
    "normalize": _on_each_dim(lambda x, dim: F.normalize(x, dim=dim)),
    "binary_cross_entropy": _of_two(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid())),
    "cross_entropy": Sample(F.cross_entropy, ("NCDHW", "NDHW"), classes=True),
    "nll_loss": Sample(lambda x, y: F.nll_loss(x.log_softmax(1), y), ("NCDHW", "NDHW"), classes=True),
    "interpolate": Sample(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")),
    "pad": Sample(lambda x: F.pad(x, (1, 2) * x.dim())),
    "getitem": Sample(lambda x: x[1:, ::2, 1:-1, :, None]),
    "narrow": _on_each_dim(lambda x, dim: x.narrow(dim, 1, 2)),
    "select": _on_each_dim(lambda x, dim: x.select(dim, 1)),
    "flip": _on_each_dim(lambda x, dim: x.flip(dim)),
    "roll": _on_each_dim(lambda x, dim: torch.roll(x, 2, dim)),
    "cat": _on_each_dim(lambda x, dim: torch.cat([x, x], dim)),
    "concat": _on_each_dim(lambda x, dim: torch.concat([x, x], dim)),
    "concatenate": _on_each_dim(lambda x, dim: torch.concatenate([x, x], dim)),
    "stack": _on_each_dim(lambda x, dim: torch.stack([x, x], dim)),
    "split": _pieces_of_each_dim(lambda x, dim: x.split(2, dim)),
    "split_with_sizes": _pieces_of_each_dim(lambda x, dim: x.split_with_sizes([1, x.size(dim) - 1], dim)),
    "chunk": _pieces_of_each_dim(lambda x, dim: x.chunk(2, dim)),
    "tensor_split": _pieces_of_each_dim(lambda x, dim: x.tensor_split(2, dim)),
    "unbind": _pieces_of_each_dim(lambda x, dim: x.unbind(dim)),
    "vsplit": Sample(lambda x: torch.vsplit(x, 3)),
    "hsplit": Sample(lambda x: torch.hsplit(x, 2)),
    "dsplit": Sample(lambda x: torch.dsplit(x, 2)),
    "permute": Sample(lambda x: x.permute(0, 2, 4, 1, 3)),
    "transpose": Sample(lambda x: x.transpose(1, 3)),
    "swapaxes": Sample(lambda x: x.swapaxes(1, 3)),
    "swapdims": Sample(lambda x: x.swapdims(0, 4)),
    "movedim": Sample(lambda x: x.movedim(1, 3)),
    "moveaxis": Sample(lambda x: x.moveaxis(0, 2)),
    "t": Sample(lambda x: x.t(), ("NC",)),
    "squeeze": _on_each_dim(lambda x, dim: x.narrow(dim, 1, 1).squeeze(dim)),
    "unsqueeze": _on_each_dim(lambda x, dim: x.unsqueeze(dim)),
    "flatten": Sample(lambda x: x.flatten(1)),
    "unflatten": Sample(lambda x: x.unflatten(1, (2, 4))),
    "view": Sample(lambda x: x.view(x.size(0), -1)),
    "reshape": Sample(lambda x: x.reshape(-1, 4)),
    "pixel_shuffle": Sample(lambda x: F.pixel_shuffle(x, 2), ("NCHW",)),
    "pixel_unshuffle": Sample(lambda x: F.pixel_unshuffle(x, 2), ("NCHW",)),
    "channel_shuffle": Sample(lambda x: F.channel_shuffle(x, 4)),
    **{f"{name}{suffix}": _read_in_time(f"{name}{suffix}") for name in _RECURRENT for suffix in ("", "_cell")},
    **{f"fft.{name}": _of_complex(getattr(torch.fft, name)) for name in _SPECTRAL},
    **{f"fft.{name}": _as_pairs(getattr(torch.fft, name)) for name in ("rfft", "ihfft", "rfft2", "rfftn")},
    **{f"fft.{name}": Sample(getattr(torch.fft, name)) for name in ("fftshift", "ifftshift")},
    **{name: _of_complex(getattr(torch, name)) for name in ("real", "imag", "conj", "angle", "resolve_conj")},
    "conj_physical": _of_complex(torch.conj_physical),
    "complex": _of_two(lambda x, y: torch.view_as_real(torch.complex(x, y))),
    "polar": _of_two(lambda x, y: torch.view_as_real(torch.polar(x * x, y))),
    "view_as_real": _of_complex(lambda z: z),
    "view_as_complex": Sample(lambda x: torch.view_as_complex(x.unflatten(-1, (5, 2))).abs()),
    "is_complex": Sample(lambda x: x * torch.is_complex(x)),
}
