"""Convolutions with few filters: one row of the product is a group of neighbouring outputs, not a single one.

An output's window is loaded again for each of its 27 neighbours, and a product with a handful of columns leaves tensor
cores idle. So a row here is a group of outputs, its columns are the group's outputs x filters, and it is multiplied by
the window that the whole group needs, in which each line is one run of memory. The weights become a banded matrix: for
every output of the group they are where its own window is in the group's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tap(place, shift, L: tl.constexpr, K: tl.constexpr):
    """Which tap of an output at `shift` is at a `place` of the window, and whether one is."""
    behind = place[:, None] - shift[None, :]
    return behind // L, (behind >= 0) & (behind < K * L) & (behind % L == 0)


@triton.jit
def banded_weights(
    w, banded,
    C: tl.constexpr, F: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr,
    RD: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    WH: tl.constexpr, RUN: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """(Lines of a group's window x places and channels of a line) x (outputs of the group x filters).

    `TURNED`: for the gradient of an input, from weights stored as for the convolution itself.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BN)
    line, at = row // PADDED, row % PADDED
    f, r = column % F, column // F
    kd, on_d = _tap(line // WH, r // (RH * RW) * SD, LD, KD)
    kh, on_h = _tap(line % WH, r // RW % RH * SH, LH, KH)
    kw, on_w = _tap(at // C, r % RW * SW, LW, KW)
    tap = (kd * KH + kh) * KW + kw
    c = (at % C)[:, None]
    if TURNED:
        places = (c * (KD * KH * KW) + (KD * KH * KW - 1 - tap)) * F + f[None, :]
    else:
        places = (f[None, :] * (KD * KH * KW) + tap) * C + c
    inside = on_d & on_h & on_w & (at < RUN)[:, None] & (r < RD * RH * RW)[None, :]
    values = tl.load(w + places, mask=inside, other=0.0)
    tl.store(banded + (row[:, None] * BN + column[None, :]), values)


@triton.jit
def grouped_forward(
    x, banded, bias, y, D, H, W, OD, OH, OW, groups_d, tiles_h, tiles_w,
    C: tl.constexpr, F: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, RD: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr,
    WD: tl.constexpr, WH: tl.constexpr, RUN: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of `BH` x `BW` groups; `BK` numbers of a line of their windows at a time."""
    PIECES: tl.constexpr = (RUN + BK - 1) // BK
    tile = tl.program_id(0)
    down, slab = tile // tiles_w % tiles_h, tile // (tiles_w * tiles_h)
    n, gd = slab // groups_d, slab % groups_d
    m = tl.arange(0, BH * BW)
    gh, gw = down * BH + m // BW, tile % tiles_w * BW + m % BW
    d0, h0, w0 = gd * (RD * SD) - PD, gh * (RH * SH) - PH, gw * (RW * SW) - PW
    start = x + (n * D + d0).to(tl.int64) * H * W * C
    rows = (h0 * W + w0) * C
    k, column = tl.arange(0, BK), tl.arange(0, BN)
    total = tl.zeros((BH * BW, BN), tl.float32)
    for step in range(WD * WH * PIECES):
        line, at = step // PIECES, step % PIECES * BK + k
        wd, wh = line // WH, line % WH
        across = w0[:, None] + (at // C)[None, :]
        height = tl.where((d0 + wd >= 0) & (d0 + wd < D), H, 0)  # 0 for a plane that does not exist
        inside = (across >= 0) & (across < W) & ((h0 + wh >= 0) & (h0 + wh < height))[:, None]
        if RUN % BK != 0:
            inside = inside & (at < RUN)[None, :]
        a = tl.load(start + ((wd * H + wh) * W * C + rows[:, None] + at[None, :]), mask=inside, other=0.0)
        b = tl.load(banded + (step * (BK * BN) + k[:, None] * BN + column[None, :]))
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + column % F).to(tl.float32)[None, :]
    r = column // F
    rd, rh, rw = r // (RH * RW), r // RW % RH, r % RW
    oh, ow = (gh * RH)[:, None] + rh[None, :], (gw * RW)[:, None] + rw[None, :]
    there = (oh < OH) & (ow < OW) & ((gd * RD + rd < OD) & (r < RD * RH * RW))[None, :]
    places = ((rd[None, :] * OH + oh) * OW + (gw * RW)[:, None]) * F + (column % (RW * F))[None, :]
    plane = (n * OD + gd * RD).to(tl.int64) * OH * OW * F
    tl.store(y + plane + places, total.to(y.dtype.element_ty), mask=there)
