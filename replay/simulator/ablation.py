"""The scheduling ablation beside the paper's hours: predicted, left out, fitted. Every number is a mean over seeds with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from replay.simulator.fit import CALIBRATED_ON, Fit, Surface, ablation_row, fit, rms
from replay.simulator.pool import ALONE, Runs, Spread, over_seeds, spread
from replay.simulator.scenario import load

FAMILIES = (("A3", "A0", "A1", "A2"), ("C2", "C3", "C1", "C0"), ("E0", "E2", "E1"))
"""Within each the paper's order, fastest first; E0 is the fastest of all."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the ablation: hours for 12 steps, and errors in percent of the paper's."""

    row: str
    title: str
    paper_h: float
    fitted: bool
    """Whether it was in the fit of the first column; the others are predictions there."""
    predicted: Spread
    """Fitted on A0, C0 and E0 alone."""
    predicted_pct: float
    left_out: Spread
    """Fitted on the ten other rows."""
    left_out_pct: float
    all_rows: Spread
    """Fitted on all eleven."""
    all_rows_pct: float


class Ablation(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[Row]
    held_out: Fit
    everything: Fit
    figures: dict[str, float]
    wrong_directions: list[str]
    """Pairs within a family whose order is not the paper's, and rows that are faster than E0; of the first column."""


def ablation(surfaces: Sequence[Surface], *, seeds: Sequence[int], runs: Runs = ALONE) -> Ablation:
    """The three columns, each played with `seeds`, which the surfaces have not seen."""
    known = {each.row: each for each in surfaces}
    some = fit([known[row] for row in CALIBRATED_ON])
    everything = fit(surfaces)
    apart = {row: fit([each for each in surfaces if each.row != row]) for row in known}
    scenarios = [
        ablation_row(row, knobs) for row in known for knobs in (some.knobs, apart[row].knobs, everything.knobs)
    ]
    spreads = [spread(each) for each in over_seeds(scenarios, seeds, runs=runs)]
    rows = [_row(row, known[row].paper_h, spreads[3 * index : 3 * index + 3]) for index, row in enumerate(known)]
    predicted = [row.predicted_pct for row in rows if not row.fitted]
    return Ablation(
        rows=rows,
        held_out=some,
        everything=everything,
        figures={
            "rms_error_heldout_pct": rms(predicted),
            "max_error_heldout_pct": max(abs(each) for each in predicted),
            "rms_error_left_out_pct": rms(row.left_out_pct for row in rows),
            "rms_error_fit_pct": rms(row.all_rows_pct for row in rows),
            "rows": float(len(rows)),
        },
        wrong_directions=wrong_directions({row.row: row.predicted.mean for row in rows}),
    )


TARGETS = {"rms_error_heldout_pct": 6.0, "max_error_heldout_pct": 10.0, "rms_error_fit_pct": 3.0}
"""Upper bounds."""


def wrong_directions(hours: dict[str, float]) -> list[str]:
    """What is not in the paper's order."""
    found = []
    for family in FAMILIES:
        for faster, slower in pairwise([row for row in family if row in hours]):
            if hours[faster] >= hours[slower]:
                found.append(f"{faster} is not faster than {slower}")
    if "E0" in hours:
        found += [f"E0 is not faster than {row}" for row in hours if row != "E0" and hours[row] <= hours["E0"]]
    return found


def _row(row: str, paper_h: float, columns: Sequence[Spread]) -> Row:
    errors = [100 * (each.mean / paper_h - 1) for each in columns]
    return Row(
        row=row,
        title=load(row).title,
        paper_h=paper_h,
        fitted=row in CALIBRATED_ON,
        predicted=columns[0],
        predicted_pct=errors[0],
        left_out=columns[1],
        left_out_pct=errors[1],
        all_rows=columns[2],
        all_rows_pct=errors[2],
    )
