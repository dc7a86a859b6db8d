"""Which networks a survey tries, under which strategies, and in which order."""

from __future__ import annotations

import argparse
import fnmatch
import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass

from benchmarks.networks.factories import Published
from benchmarks.networks.findings import Finding, Findings
from benchmarks.networks.published import published
from benchmarks.networks.surveying import ON_FOUR

SECONDS_UNKNOWN = 20.0
"""What a strategy of a network may take where nothing like it was tried before."""


@dataclass(frozen=True)
class Case:
    """A network, the strategies that it is tried under in one process, and how long they may take."""

    network: Published
    strategies: tuple[str, ...]
    seconds: float = 0.0


def cases(arguments: argparse.Namespace, findings: Findings) -> list[Case]:
    """What is asked for and has no result yet: first networks without any, of those the longest."""
    asked = _asked(arguments.networks, findings)
    drawn = _third(asked, arguments.seed) if arguments.third else set()
    work = {n: (*arguments.strategy, *(ON_FOUR if n.name in drawn else ())) for n in asked}
    done = (
        set()
        if arguments.again or arguments.dry
        else {key for key, found in findings.items() if _is_kept(found, arguments.since)}
    )
    left = {n: tuple(s for s in strategies if (n.name, s) not in done) for n, strategies in work.items()}
    expected = [Case(n, each, _expected_seconds(n.name, each, findings)) for n, each in left.items() if each]
    first, of = arguments.part
    return (_longest_first(expected, findings) if arguments.workers > 1 else expected)[first - 1 :: of]


def _is_kept(found: Finding, since: str) -> bool:
    return not found.is_unfinished and found.date >= since


def _asked(patterns: list[str], findings: Findings) -> list[Published]:
    """Of each pattern those first that were tried least, and small ones."""
    tried = _tried(findings)
    every = sorted(published().values(), key=lambda n: (tried[n.name], math.prod(n.shape)))
    return [*dict.fromkeys(n for pattern in patterns for n in every if fnmatch.fnmatchcase(n.name, pattern))]


def _third(networks: list[Published], seed: int | None) -> set[str]:
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    print(f"a third of the networks also on 4 ranks: --seed {seed} draws the same", flush=True)
    return set(random.Random(seed).sample(sorted(n.name for n in networks), len(networks) // 3))


def _longest_first(found: list[Case], findings: Findings) -> list[Case]:
    """So that no worker begins a long one when the others are done."""
    tried = _tried(findings)
    return sorted(found, key=lambda case: (tried[case.network.name] > 0, -case.seconds))


def _tried(findings: Findings) -> Counter[str]:
    return Counter(found.network for found in findings.values() if not found.is_unfinished)


def _expected_seconds(name: str, strategies: tuple[str, ...], findings: Findings) -> float:
    """From other strategies of the network, or from others of its package."""
    own = [f.seconds + f.seconds_plan for f in findings.values() if f.network == name and f.seconds]
    package = name.partition(".")[0]
    alike = [f.seconds + f.seconds_plan for f in findings.values() if f.network.startswith(f"{package}.") and f.seconds]
    known = max(own) if own else statistics.median(alike) if alike else SECONDS_UNKNOWN
    return known * len(strategies)
