"""The document of a timeline: one JSON value that the picture and the page are drawn from.

    head     what run it is, its rules, the time and the sequences that it covers
    lists    names, rules' names, cells, series, says: tables below refer to their entries by index
    tables   events, changes, reasons: columns of equal length, rows in log order

Lists and tables only grow, so that a part (`Document` with the rows since the last) can be appended to a whole: that is
what a live stream sends. A series is a quantity that holds its value until its next row in `changes`. Times are whole
milliseconds since the first event.
"""

from __future__ import annotations

import msgspec

FORMAT = "gyre-timeline"
VERSION = 1
ROLES = ("rollout", "leaving", "training", "returning", "out", "away")
"""Values of a cell's series `role`. leaving and returning: on its way to training, and back; out: put out of training,
until it is sent back; away: in the rollout role, and serves nobody (withdrawn, lost, or kept for training)."""


class Rules(msgspec.Struct, kw_only=True):
    """What of the configuration a reader of the picture needs."""

    strategy: str = ""
    N: int = 0
    B: int = 0
    mu: int = 0
    phi: float = 0.0
    rho_min: float = 0.0
    tau_s: float = 0.0
    C_e: int = 0
    C_s: int = 0
    steps: int = 0


class Says(msgspec.Struct, kw_only=True):
    """Who says what."""

    kind: str
    owner: str
    decision: bool


class CellRow(msgspec.Struct, kw_only=True):
    name: str
    index: int
    pool: bool
    """An engine of the separate pool."""
    capacity: int


class SeriesRow(msgspec.Struct, kw_only=True):
    name: str
    """Of the run: d, p, f (ledger), C_R, ready, supply, held_out, version, published, step, burst (numbers), batch (index
    into names, -1: none), claimed, enqueued, done (groups and micro-steps of the batch), held (sequence of the
    `cell.held` that tells what keeps the next cell from training, 0: none), paused.
    Of a cell: role (index into roles), load, epoch, version, micro_step (index into names, -1: none), because (sequence
    of the decision that its role comes from)."""
    cell: int = -1
    """Index into cells; -1 for a series of the run."""


class Events(msgspec.Struct, kw_only=True):
    """Events of the log, but for those that `left_out` counts."""

    seq: list[int] = []
    t: list[int] = []
    says: list[int] = []
    entity: list[int] = []
    """Index into names."""
    cell: list[int] = []
    """Index into cells of the cell that it concerns; -1: none, or unknown."""
    cause: list[int] = []
    """Sequence of the event that led to it; 0 when nothing in the log did."""
    note: list[str] = []
    """Its data in a few words."""


class Changes(msgspec.Struct, kw_only=True):
    seq: list[int] = []
    t: list[int] = []
    series: list[int] = []
    value: list[int] = []


class Reasons(msgspec.Struct, kw_only=True):
    """The checks that decisions carry: `left op right`, and whether it holds."""

    seq: list[int] = []
    rule: list[int] = []
    """Index into checks."""
    left: list[float] = []
    op: list[str] = []
    right: list[float] = []
    holds: list[int] = []
    """1 or 0."""


class Document(msgspec.Struct, kw_only=True):
    format: str = FORMAT
    version: int = VERSION
    title: str = ""
    run: str = ""
    code: str = ""
    """Identity of the code that ran."""
    start_us: int = 0
    """Stored time of the first event, microseconds since the epoch."""
    end: int = 0
    """t of the last event."""
    first: int = 0
    last: int = 0
    """Sequences of the first and the last event."""
    finished: str = ""
    """Reason of `run.finished`; empty while the run goes on."""
    rules: Rules = msgspec.field(default_factory=Rules)
    roles: list[str] = msgspec.field(default_factory=lambda: list(ROLES))
    names: list[str] = []
    """Entities; empty where everything that would refer to one is left out."""
    checks: list[str] = []
    """Names of rules in reasons."""
    cells: list[CellRow] = []
    says: list[Says] = []
    series: list[SeriesRow] = []
    events: Events = msgspec.field(default_factory=Events)
    changes: Changes = msgspec.field(default_factory=Changes)
    reasons: Reasons = msgspec.field(default_factory=Reasons)
    left_out: dict[str, int] = {}
    """Kind to the number of its events that are not listed, because there are too many for a page."""
    resolution: int = 0
    """Changes of counts closer together than this (in t) are left out but for the last; 0: all are there."""

    def values(self, name: str, cell: int = -1) -> list[tuple[int, int, int]]:
        """Rows of one series: t, sequence, value. Empty when there is none."""
        for index, row in enumerate(self.series):
            if row.name == name and row.cell == cell:
                c = self.changes
                return [
                    (t, seq, value)
                    for t, seq, series, value in zip(c.t, c.seq, c.series, c.value, strict=True)
                    if series == index
                ]
        return []


def split(document: Document) -> dict[tuple[str, int], list[tuple[int, int, int]]]:
    """All series at once: (name, cell) to rows of t, sequence, value."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in document.series]
    c = document.changes
    for t, seq, series, value in zip(c.t, c.seq, c.series, c.value, strict=True):
        rows[series].append((t, seq, value))
    return {(row.name, row.cell): found for row, found in zip(document.series, rows, strict=True)}
