"""Calibrate every series on its anchors, then predict its other runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from convmesh.oracle.pricing.estimate import Basis, Estimate
from convmesh.validation.anchors import AnchorPoint, Calibration, Prior, fit, pooled
from convmesh.validation.measured_run import MeasuredRun, Series
from convmesh.validation.run_pricing import Case, price
from convmesh.validation.score import Scored, Validation

ROUNDS = 3
"""Overlap depends on the speed of computing, so the fit is repeated with the parts that it leads to."""

CaseOf = Callable[[MeasuredRun], Case]


def validate(
    runs: Sequence[MeasuredRun], case_of: CaseOf, published: Sequence[MeasuredRun] = (), prior: Prior | None = None
) -> Validation:
    """Predict the test runs; their measured times are used only to score.

    A series without an anchor is calibrated on the most similar ones, including `published` anchors.
    """
    assumed = prior or Prior()
    anchors = [run for run in (*runs, *published) if run.role == "anchor"]
    tests = [run for run in runs if run.role == "test"]
    wanted = {run.series for run in tests}
    alone = wanted <= {run.series for run in anchors}
    calibrated = calibrations([run for run in anchors if not alone or run.series in wanted], case_of, assumed)
    return Validation(tuple(_scored(case_of(run), _for(run, calibrated, assumed)) for run in tests))


def calibrations(anchors: Iterable[MeasuredRun], case_of: CaseOf, prior: Prior) -> dict[Series, Calibration]:
    """The calibration of every series with an anchor."""
    grouped: dict[Series, list[Case]] = defaultdict(list)
    for run in anchors:
        grouped[run.series].append(case_of(run))
    return {series: _calibrated(cases, prior) for series, cases in grouped.items()}


def _calibrated(cases: Sequence[Case], prior: Prior) -> Calibration:
    calibration = fit((), prior)
    for _ in range(ROUNDS):
        calibration = fit([_point(case, calibration) for case in cases], prior)
    return calibration


def _point(case: Case, calibration: Calibration) -> AnchorPoint:
    priced = price(case, calibration)
    return AnchorPoint(
        compute=priced.compute / calibration.compute,
        waiting=priced.waiting / calibration.transfer,
        measured=case.run.seconds_step,
        measured_compute=case.run.seconds_compute,
    )


def _for(run: MeasuredRun, known: Mapping[Series, Calibration], prior: Prior) -> Calibration:
    if run.series in known:
        return known[run.series]
    alike = [(_likeness(run, series), calibration) for series, calibration in known.items()]
    return pooled(alike, prior)


def _likeness(run: MeasuredRun, series: Series) -> float:
    """Weight of a series for a run of another one: the network counts most, then device, number format and code."""
    weight = 100.0 if series.model == run.model else 30.0 if _family(series.model) == _family(run.model) else 1.0
    weight *= 10.0 if series.system == run.system else 1.0
    weight *= 3.0 if series.precision == run.precision else 1.0
    return weight * (3.0 if series.source == run.source else 1.0)


def _family(model: str) -> str:
    return model.partition("-")[0]


def _scored(case: Case, calibration: Calibration) -> Scored:
    step = price(case, calibration).step
    off = math.exp(calibration.spread)
    basis: Basis = "interpolated" if calibration.anchors else "guess"
    return Scored(case.run, Estimate(step, step / off, step * off, basis), calibration)
