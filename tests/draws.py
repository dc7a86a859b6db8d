"""How many shapes a multi-rank test draws: a share of them in `make test`, all of them in `make test-full`."""

import math
import os

from hypothesis import settings

IS_FULL = os.environ.get("CONVMESH_TEST") == "full"

SHARE = 0.4
"""Of the examples that a test names, the part that `make test` draws: every test on every mesh, with fewer shapes."""

LEAST = 3
"""The first example that hypothesis draws is the smallest one; from the second on they vary."""


def examples(count: int) -> int:
    """The examples to draw where `count` would be thorough."""
    return count if IS_FULL else max(LEAST, math.ceil(SHARE * count))


def draws(count: int) -> settings:
    """Draw up to `count` examples; each runs on real ranks, so `make test` takes fewer."""
    return settings(max_examples=examples(count))
