"""Convolutions as matrix products over windows that are never written out: rows are outputs, columns taps and channels.

Tensors are channels-last. Inputs are loaded in one of two ways. As a block of outputs x taps x channels: neighbouring
threads then read the channels of neighbouring outputs, which are adjacent in memory. Or `FLAT`, as outputs x (taps x
channels): neighbouring threads read the taps of one output, which are spread over nine rows of three planes, but what
is read can be copied to shared memory ahead of time. A tile of outputs is a rectangle of one plane; a program walks
down a strip of tiles, so that addresses and masks are computed once for many.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _strip(unit, OD, strips, tiles_h, WALK: tl.constexpr):
    """Sample and plane of a strip of tiles, one below the other, its first tile, and the one after its last."""
    plane, first = unit // strips, unit % strips * WALK
    return plane // OD, plane % OD, first, tl.minimum(first + WALK, tiles_h)


@triton.jit
def _outputs(down, across, BH: tl.constexpr, BW: tl.constexpr):
    """Rows and columns of a tile's outputs; in a tile of one row, the row is a number."""
    if BH == 1:
        return down, across * BW + tl.arange(0, BW)
    else:
        m = tl.arange(0, BH * BW)
        return down * BH + m // BW, across * BW + m % BW


@triton.jit
def _there(oh, ow, OH, OW, BH: tl.constexpr):
    """Which outputs of a tile exist; in a tile of one row, the row always does."""
    if BH == 1:
        return ow < OW
    else:
        return (oh < OH) & (ow < OW)


@triton.jit
def _inputs(
    x, n, depth, rows, columns, t0, D, H, W,
    C: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Windows x (taps x channels), for windows whose first taps are at `depth`, `rows`, `columns`, from tap `t0` on."""
    if FLAT:
        k = tl.arange(0, BT * BC)
        tap, c = t0 + k // BC, k % BC
    else:
        tap = t0 + tl.arange(0, BT)
        c = tl.arange(0, BC)
    kd, kh, kw = tap // (KH * KW) * LD, tap // KW % KH * LH, tap % KW * LW
    plane = (n * D + depth).to(tl.int64) * H * W * C
    taps = ((kd * H + kh) * W + kw) * C
    in_tap = (tap < KD * KH * KW) & (depth + kd >= 0) & (depth + kd < D)
    if FLAT:
        taps += c
        if BC != C:
            in_tap = in_tap & (c < C)
    across = columns[:, None] + kw[None, :]
    inside = (across >= 0) & (across < W) & in_tap[None, :]
    offsets = columns[:, None] * C + taps[None, :]
    if BH == 1:
        inside = inside & ((rows + kh >= 0) & (rows + kh < H))[None, :]
        start = x + (plane + rows * W * C)
    else:
        down = rows[:, None] + kh[None, :]
        inside = inside & (down >= 0) & (down < H)
        offsets += (rows * W * C)[:, None]
        start = x + plane
    if FLAT:
        return tl.load(start + offsets, mask=inside, other=0.0)
    else:
        mask = inside[:, :, None]
        if BC != C:
            mask = mask & (c < C)[None, None, :]
        values = tl.load(start + (offsets[:, :, None] + c[None, None, :]), mask=mask, other=0.0)
        return tl.reshape(values, (BH * BW, BT * BC))


@triton.jit
def _weights(w, tap, f, C: tl.constexpr, F: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr):
    """(Taps x channels) x filters."""
    c = tl.arange(0, BC)
    inside = (tap < TAPS)[:, None, None] & (c < C)[None, :, None] & (f < F)[None, None, :]
    places = (tap * C)[:, None, None] + c[None, :, None] + (f * (TAPS * C))[None, None, :]
    values = tl.load(w + places, mask=inside, other=0.0)
    return tl.reshape(values, (tap.shape[0] * BC, f.shape[0]))


@triton.jit
def forward(
    x, w, bias, y, D, H, W, OD, OH, OW, strips, tiles_h, tiles_w,
    C: tl.constexpr, F: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, WALK: tl.constexpr,
    FLAT: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A strip of tiles of outputs, for `BF` filters."""
    TAPS: tl.constexpr = KD * KH * KW
    n, d, first, behind = _strip(tl.program_id(0) // tiles_w, OD, strips, tiles_h, WALK)
    across = tl.program_id(0) % tiles_w
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    plane = (n * OD + d).to(tl.int64) * OH * OW * F
    tap = tl.arange(0, BT)
    if TAPS <= BT:  # one product: weights stay where they are
        b = _weights(w, tap, f, C, F, TAPS, BC)
    for down in range(first, behind):
        oh, ow = _outputs(down, across, BH, BW)
        rows, columns = oh * SH - PH, ow * SW - PW
        total = tl.zeros((BH * BW, BF), tl.float32)
        if TAPS <= BT:
            a = _inputs(
                x, n, d * SD - PD, rows, columns, 0, D, H, W, C, KD, KH, KW, LD, LH, LW, BH, BW, BT, BC, FLAT
            )  # fmt: skip
            total = tl.dot(a, b, total, input_precision=PRECISION)
        else:
            for t0 in range(0, TAPS, BT):
                a = _inputs(
                    x, n, d * SD - PD, rows, columns, t0, D, H, W, C, KD, KH, KW, LD, LH, LW, BH, BW, BT, BC, FLAT
                )  # fmt: skip
                total = tl.dot(a, _weights(w, t0 + tap, f, C, F, TAPS, BC), total, input_precision=PRECISION)
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
    BH: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, WALK: tl.constexpr,
    FLAT: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`BT` taps of `BF` filters, summed over a share of the strips; each program writes a separate part.

    With a bias, the first taps' programs also sum its gradient into `sums`, from values that they read anyway.
    """
    K: tl.constexpr = KD * KH * KW * C
    part, parted = tl.program_id(2), tl.num_programs(2)
    across = part % tiles_w
    t0 = tl.program_id(0) * BT
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    total = tl.zeros((BT * BC, BF), tl.float32)
    shift = tl.zeros((BH * BW, BF), tl.float32)  # each thread adds up its own: a sum over a tile makes warps wait
    for unit in range(part // tiles_w, units, parted // tiles_w):
        n, d, first, behind = _strip(unit, OD, strips, tiles_h, WALK)
        plane = (n * OD + d).to(tl.int64) * OH * OW * F
        for down in range(first, behind):
            oh, ow = _outputs(down, across, BH, BW)
            inside = _there(oh, ow, OH, OW, BH)[:, None] & (f < F)[None, :]
            b = tl.load(g + plane + ((oh * OW + ow)[:, None] * F + f[None, :]), mask=inside, other=0.0)
            a = _inputs(
                x, n, d * SD - PD, oh * SH - PH, ow * SW - PW, t0, D, H, W,
                C, KD, KH, KW, LD, LH, LW, BH, BW, BT, BC, FLAT,
            )  # fmt: skip
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
            if HAS_BIAS:
                shift += b.to(tl.float32)
    if HAS_BIAS:
        tl.store(sums + part * F + f, tl.sum(shift, 0), mask=f < tl.where(tl.program_id(0) == 0, F, 0))
    row = tl.arange(0, BT * BC)
    tap, c = t0 + row // BC, row % BC
    kept = ((tap < KD * KH * KW) & (c < C))[:, None] & (f < F)[None, :]
    here = parts + part.to(tl.int64) * (F * K)
    tl.store(here + (f[None, :] * K + (tap * C + c)[:, None]), total, mask=kept)
