"""The kind of an operator by its name."""

from __future__ import annotations

import re

WITHOUT_SPLIT = frozenset({"input", "output", "attribute", "size"})
"""Kinds of nodes that no plan can cut: they compute no tensor of the network."""

DRAWS = ("dropout", "noise")
"""Kinds of nodes that draw random numbers: each takes one seed of the mesh."""

WINDOW_OPTIONS = ("kernel", "stride", "padding", "dilation", "groups", "output_padding")

_POINTWISE = """
    relu relu6 leaky_relu elu selu celu gelu silu mish softplus hardtanh hardswish hardsigmoid hardshrink softshrink
    tanhshrink softsign logsigmoid threshold sigmoid tanh glu rrelu prelu identity exp log log1p log2 expm1 sqrt rsqrt
    abs absolute neg negative sin cos tan atan erf square reciprocal sign floor ceil round trunc clamp clip clone
    contiguous float double half bfloat16 long int bool to type type_as zeros_like ones_like full_like empty_like
    isnan isfinite logical_not logical_and logical_or add sub subtract rsub mul multiply div
    divide true_divide truediv floordiv floor_divide mod pow maximum minimum lt le gt ge eq ne atan2 fmod remainder
    real imag conj conj_physical angle complex polar resolve_conj
    where nan_to_num lerp addcmul addcdiv masked_fill detach requires_grad copy fill zero invert and or xor cuda cpu
"""
_RESHAPE = """
    view view_as reshape reshape_as flatten unflatten permute transpose t squeeze unsqueeze swapaxes swapdims movedim
    moveaxis pixel_shuffle pixel_unshuffle channel_shuffle expand expand_as broadcast_to broadcast_tensors flip roll
    repeat tile repeat_interleave meshgrid fold unfold view_as_real view_as_complex fft_fftshift fft_ifftshift
"""
_INDEX = """
    getitem select narrow chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind index_select gather take
    index_copy index_add scatter scatter_add masked_select embedding one_hot
"""
_REDUCE = """
    mean sum var std var_mean std_mean prod amax amin max min argmax argmin norm linalg_vector_norm any all
    count_nonzero logsumexp cumsum cumprod logcumsumexp cummax cummin median topk sort argsort diff histc
"""
_NORM = "instance_norm group_norm layer_norm rms_norm local_response_norm normalize weight_norm"
_KINDS = {
    "pointwise": _POINTWISE,
    "reshape": _RESHAPE,
    "index": _INDEX,
    "reduce": _REDUCE,
    "norm": _NORM,
    "linear": "linear matmul mm addmm rmatmul bilinear",
    "product": (
        "bmm baddbmm einsum tensordot outer scaled_dot_product_attention multi_head_attention_forward "
        "multihead_attention"
    ),
    "spectral": (
        "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn "
        "fft_ifftn fft_rfftn fft_irfftn"
    ),
    "recurrent": "lstm gru rnn lstm_cell gru_cell rnn_cell rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell",
    "join": "cat concat concatenate stack hstack vstack dstack",
    "resize": "interpolate upsample upsample_nearest upsample_bilinear pad grid_sample affine_grid",
    "attribute": "new_zeros new_ones new_full new_empty new_tensor",
    "noise": "rand_like randn_like bernoulli uniform normal rand randn randint randperm",
    "softmax": "softmax log_softmax softmin softmax2d gumbel_softmax",
}
_BY_NAME = {name: kind for kind, names in _KINDS.items() for name in names.split()}

_PATTERNS = (
    (re.compile(r"(lazy_)?conv_transpose[123]d"), "conv_transpose"),
    (re.compile(r"(lazy_)?conv[123]d|convolution"), "conv"),
    (re.compile(r"(sync_)?batch_norm([123]d)?"), "batch_norm"),
    (re.compile(r"instance_norm[123]d"), "norm"),
    (re.compile(r".*(pool|unpool)([123]d)?(_with_indices)?"), "pool"),
    (re.compile(r".*dropout([123]d)?"), "dropout"),
    (re.compile(r".*_loss|cross_entropy|binary_cross_entropy.*|.*kl_div"), "loss"),
    (re.compile(r"(zero|constant|reflection|replication|circular)_pad[123]d"), "resize"),
    (re.compile(r"upsample.*|upsampling_.*"), "resize"),
)


def readable(op: str) -> str:
    """An operator's name as a reader knows it: `relu` for `relu_`, `add` for `iadd`."""
    plain = op.strip("_") or op
    in_place = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv", "ipow": "pow"}
    return in_place.get(plain, plain)


def kind_of(op: str) -> str | None:
    """The kind of a function, method or torch.nn class by its name; None for an unknown name."""
    name = _snake(op)
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((kind for pattern, kind in _PATTERNS if pattern.fullmatch(name)), None)


def _snake(op: str) -> str:
    """`ConvTranspose2d` → `conv_transpose2d`, `GELU` → `gelu`, `MaxPool2d` → `max_pool2d`."""
    if op in _CLASS_NAMES:
        return _CLASS_NAMES[op]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", readable(op)).lower()


_CLASS_NAMES = {
    "ReLU": "relu",
    "ReLU6": "relu6",
    "LeakyReLU": "leaky_relu",
    "PReLU": "prelu",
    "RReLU": "rrelu",
    "SiLU": "silu",
    "ELU": "elu",
    "SELU": "selu",
    "CELU": "celu",
    "GELU": "gelu",
    "GLU": "glu",
    "LogSigmoid": "logsigmoid",
    "PixelShuffle": "pixel_shuffle",
    "RMSNorm": "rms_norm",
    "LSTMCell": "lstm_cell",
    "GRUCell": "gru_cell",
    "RNNCell": "rnn_cell",
    "CrossMapLRN2d": "local_response_norm",
}
