"""How much a rank's work counts when it arrives in an asynchronous update of the shared weights.

The idea is the asynchronous global weight update (AGWU) of BPT-CNN (Chen et al., "A bi-layered parallel training
architecture for large-scale convolutional neural networks", IEEE TPDS 2019): late work counts less. The formula is ours
and has not been compared with the paper's. A rank that trained from version k of the weights to w turns version i - 1
into

    W(i) = W(i-1) + gamma(k) * Q * (w - W(k)),    gamma(k) = exp(k / (i-1)) / sum over ranks of exp(k' / (i-1))

where k' are the versions that the ranks hold, so that the work of n ranks counts as their mean. Q comes from a rank's
loss, which every network has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def attenuation(version: int, held: Iterable[int], newest: int) -> float:
    """The factor gamma of work that began at `version`, if ranks hold the versions `held`."""
    age = max(1, newest)
    return math.exp(version / age) / sum(math.exp(each / age) for each in held)


def quality(loss: float, losses: Iterable[float]) -> float:
    """The factor Q: 1 for the rank with the lowest of the ranks' last losses, less for others; 0 if it is not finite.

    Losses are compared with 1 added: where ranks have almost learnt the task, luck with batches should not make one
    count for much more.
    """
    if not math.isfinite(loss):
        return 0.0
    least = min((each for each in losses if math.isfinite(each)), default=loss)
    return (1 + max(0.0, min(least, loss))) / (1 + max(0.0, loss))
