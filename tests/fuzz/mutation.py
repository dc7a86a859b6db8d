"""Bytes of a file, a little wrong."""

from __future__ import annotations

import random
import struct

WORDS = (
    b"9" * 400, b"-1", b"1e999", b"nan", b"null", b"true", b"[", b"]" * 3, b"{", b"}", b'"', b"\\", b"\0", b"\xff\xfe",
    b"../", b"/etc/passwd", b"=", b"\n", b",", b"[[a]]\n", b"0x" + b"f" * 40, b"\xc3\xa4",
)  # fmt: skip
"""What parsers stumble over."""

NUMBERS = (0, 1, -1, 127, 128, 255, 1 << 15, 1 << 31, (1 << 31) - 1, (1 << 62) - 1, -(1 << 62))
MOST_CHANGES = 4


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes after one to a few changes."""
    for _ in range(draw.randint(1, MOST_CHANGES)):
        at = draw.randrange(len(data) + 1)
        data = draw.choice((_flipped, _numbered, _cut, _repeated, _ended, _worded))(data, at, draw)
    return data


def _flipped(data: bytes, at: int, draw: random.Random) -> bytes:
    return data[:at] + bytes(byte ^ 1 << draw.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _numbered(data: bytes, at: int, draw: random.Random) -> bytes:
    width, order = draw.choice((1, 2, 4, 8)), draw.choice("<>")
    number = draw.choice(NUMBERS) % (1 << 8 * width)
    code = {1: "B", 2: "H", 4: "I", 8: "Q"}[width]
    return data[:at] + struct.pack(order + code, number) + data[at + width :]


def _cut(data: bytes, at: int, draw: random.Random) -> bytes:
    return data[:at] + data[at + draw.choice((1, 2, 8, 64)) :]


def _repeated(data: bytes, at: int, draw: random.Random) -> bytes:
    end = at + draw.choice((1, 8, 64, 512))
    return data[:end] + data[at:end] * draw.choice((1, 1, 30)) + data[end:]


def _ended(data: bytes, at: int, draw: random.Random) -> bytes:
    return data[:at]


def _worded(data: bytes, at: int, draw: random.Random) -> bytes:
    return data[:at] + draw.choice(WORDS) + data[at + draw.choice((0, 0, 1, 8)) :]
