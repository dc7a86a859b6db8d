"""Convolutions as matrix products over windows that are never written out: rows are outputs, columns taps.

Tensors are channels-last. The taps of an output are numbered as weights lie in memory: by depth, height, width and
channel, the channel fastest. So are inputs, wherefore a run of `width x channels` taps is one piece of memory; with few
channels that is what makes loads wide. A tile of outputs is a rectangle of one plane; a program walks down a strip of them,
so that addresses and masks, which cost more than the products, are computed once for many.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tap(k, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr):
    """How far taps lie from a window's first one, in depth, height, width; and their channels."""
    position = k // C
    return position // (KH * KW) * LD, position // KW % KH * LH, position % KW * LW, k % C


@triton.jit
def _strip(unit, OD, strips, tiles_h, WALK: tl.constexpr):
    """Sample and plane of a strip of tiles that lie below each other, its first tile, and the one behind its last."""
    plane, first = unit // strips, unit % strips * WALK
    return plane // OD, plane % OD, first, tl.minimum(first + WALK, tiles_h)


@triton.jit
def _outputs(down, across, BH: tl.constexpr, BW: tl.constexpr):
    """Rows and columns of a tile's outputs; the row of a tile of one is a number."""
    if BH == 1:
        return down, across * BW + tl.arange(0, BW)
    else:
        m = tl.arange(0, BH * BW)
        return down * BH + m // BW, across * BW + m % BW


@triton.jit
def _there(oh, ow, OH, OW, BH: tl.constexpr):
    """Which outputs of a tile there are: rows of a tile of one always."""
    if BH == 1:
        return ow < OW
    else:
        return (oh < OH) & (ow < OW)


@triton.jit
def _inputs(
    x, n, depth, rows, columns, k, D, H, W,
    C: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Inputs of windows whose first taps lie at `depth`, `rows`, `columns`: a row for each window, a column a tap."""
    kd, kh, kw, c = _tap(k, C, KH, KW, LD, LH, LW)
    plane = (n * D + depth).to(tl.int64) * H * W * C
    taps = ((kd * H + kh) * W + kw) * C + c
    in_tap = (k < KD * KH * KW * C) & (depth + kd >= 0) & (depth + kd < D)
    across = columns[:, None] + kw[None, :]
    inside = (across >= 0) & (across < W) & in_tap[None, :]
    offsets = columns[:, None] * C + taps[None, :]
    if BH == 1:  # offsets and most of the mask are the same for all rows of a strip: computed once
        inside = inside & ((rows + kh >= 0) & (rows + kh < H))[None, :]
        return tl.load(x + (plane + rows * W * C) + offsets, mask=inside, other=0.0)
    else:
        down = rows[:, None] + kh[None, :]
        inside = inside & (down >= 0) & (down < H)
        return tl.load(x + plane + (offsets + (rows * W * C)[:, None]), mask=inside, other=0.0)


@triton.jit
def forward(
    x, w, bias, y, D, H, W, OD, OH, OW, strips, tiles_h, tiles_w,
    C: tl.constexpr, F: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, WALK: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A strip of tiles of outputs, for `BF` filters."""
    K: tl.constexpr = KD * KH * KW * C
    n, d, first, behind = _strip(tl.program_id(0) // tiles_w, OD, strips, tiles_h, WALK)
    across = tl.program_id(0) % tiles_w
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    plane = (n * OD + d).to(tl.int64) * OH * OW * F
    k = tl.arange(0, BK)
    if K <= BK:  # one product: weights stay where they are
        b = tl.load(w + (f[None, :] * K + k[:, None]), mask=(k[:, None] < K) & (f[None, :] < F), other=0.0)
    for down in range(first, behind):
        oh, ow = _outputs(down, across, BH, BW)
        rows, columns = oh * SH - PH, ow * SW - PW
        total = tl.zeros((BH * BW, BF), tl.float32)
        if K <= BK:
            a = _inputs(x, n, d * SD - PD, rows, columns, k, D, H, W, C, KD, KH, KW, LD, LH, LW, BH)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        else:
            for k0 in range(0, K, BK):
                now = k0 + k
                a = _inputs(x, n, d * SD - PD, rows, columns, now, D, H, W, C, KD, KH, KW, LD, LH, LW, BH)
                b = tl.load(w + (f[None, :] * K + now[:, None]), mask=(now[:, None] < K) & (f[None, :] < F), other=0.0)
                total = tl.dot(a, b, total, input_precision=PRECISION)
        if HAS_BIAS:
            total += tl.load(bias + f, mask=f < F, other=0.0).to(tl.float32)[None, :]
        inside = _there(oh, ow, OH, OW, BH)[:, None] & (f < F)[None, :]
        tl.store(y + plane + ((oh * OW + ow)[:, None] * F + f[None, :]), total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def weight_gradient(
    x, g, parts, sums, units, D, H, W, OD, OH, OW, strips, tiles_h, tiles_w,
    C: tl.constexpr, F: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, WALK: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`BK` taps of `BF` filters, summed over a share of the strips; each program writes a part of its own.

    With a bias the first taps' programs sum its gradient, which they read anyway, into `sums`.
    """
    K: tl.constexpr = KD * KH * KW * C
    part, parted = tl.program_id(2), tl.num_programs(2)
    across = part % tiles_w
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    total = tl.zeros((BK, BF), tl.float32)
    shift = tl.zeros((BF,), tl.float32)
    for unit in range(part // tiles_w, units, parted // tiles_w):
        n, d, first, behind = _strip(unit, OD, strips, tiles_h, WALK)
        plane = (n * OD + d).to(tl.int64) * OH * OW * F
        for down in range(first, behind):
            oh, ow = _outputs(down, across, BH, BW)
            inside = _there(oh, ow, OH, OW, BH)[:, None] & (f < F)[None, :]
            b = tl.load(g + plane + ((oh * OW + ow)[:, None] * F + f[None, :]), mask=inside, other=0.0)
            a = _inputs(x, n, d * SD - PD, oh * SH - PH, ow * SW - PW, k, D, H, W, C, KD, KH, KW, LD, LH, LW, BH)
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
            if HAS_BIAS:
                shift += tl.sum(b.to(tl.float32), 0)
    if HAS_BIAS:
        tl.store(sums + part * F + f, shift, mask=f < tl.where(tl.program_id(0) == 0, F, 0))
    here = parts + part.to(tl.int64) * (F * K)
    tl.store(here + (f[None, :] * K + k[:, None]), total, mask=(k[:, None] < K) & (f[None, :] < F))
