"""The kernels behind `torch.fft`: their names are private, and traced steps contain no others."""

from __future__ import annotations

import torch

FOURIER_KERNELS = frozenset({torch.ops.aten._fft_c2c, torch.ops.aten._fft_r2c, torch.ops.aten._fft_c2r})
