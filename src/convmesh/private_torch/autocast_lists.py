"""How autocast treats operators on each kind of device: which run low, which in float32, which in their widest type.

Torch says which operators autocast handles on a kind of device, but not what it does to them: that is only in its C++
(`ATen/autocast_mode.h`) and its documentation. So the names come from torch, and the few that do not run in float32
are listed here; a test compares both with torch's own autocast.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from torch import _C as C

Policy = Literal["low", "float32", "float32 result", "widest"]
"""What happens to tensors of at most 32 bits: they are cast to autocast's type, to float32, not at all but with a
float32 result, or to the widest type among them."""

_LOW = frozenset(
    (
        "_convolution", "convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr",
        "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul",
        "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
        "rnn_relu_cell", "mkldnn_rnn_layer", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
        "_native_multi_head_attention", "_addmm_activation",
    )
)  # fmt: skip

_WIDEST = {
    "cpu": frozenset(("cat", "stack", "index_copy")),
    "cuda": frozenset(
        ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
         "scatter_add")
    ),
}  # fmt: skip

_FLOAT32_RESULT = frozenset(
    ("prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum", "norm")
)
"""On GPUs, where their kernels take a narrow type and return a wide one."""


@cache
def policies(kind: str) -> dict[str, Policy]:
    """What autocast does on `cpu` or `cuda`, by operator, e.g. `conv2d.padding`."""
    names = C._dispatch_get_registrations_for_dispatch_key(f"Autocast{kind.upper()}")
    listed = sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::"))
    return {name: _policy(name.partition(".")[0], kind) for name in listed}


def _policy(name: str, kind: str) -> Policy:
    if name in _LOW:
        return "low"
    if name in _WIDEST[kind]:
        return "widest"
    return "float32 result" if kind == "cuda" and name in _FLOAT32_RESULT else "float32"
