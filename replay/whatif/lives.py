"""What each execution does in the recorded world: as it was recorded, or drawn from the recording by its id.

1. an attempt that was recorded to its end does the same again, whenever it starts;
2. one that was cut off goes on beyond what was seen of it: with a group of which others ended, at their pace (their mean
   logarithm) times the spread of a recorded execution around its own group; else as the member of another group that lasted
   longer;
3. one of a group that was never seen takes the life of a member of a recorded group, the whole group of one and the same: so
   executions of a group go on having something in common.

Draws use a generator seeded from the run and the id: never when, or after what, an execution is asked for.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import Literal

import msgspec

from replay.logfile import BadLogFile
from replay.whatif.recording import Life, Recording
from schemas.ids import group_of, order_of

How = Literal["recorded", "prolonged", "drawn"]


class Lived(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt does: the life that it takes, and for how long it runs."""

    life: Life
    ran_us: int
    how: How


class Lives:
    def __init__(self, recording: Recording) -> None:
        self._run = recording.run
        self._lives = recording.lives
        self._known: dict[tuple[str, int], Lived] = {}
        self._members: dict[str, dict[str, Life]] = {}
        """Group or measurement to its executions that were recorded whole."""
        self._seen: dict[str, dict[str, int]] = {}
        """The same to how long each execution was seen to run that was cut off."""
        for (name, _), life in sorted(recording.lives.items(), key=lambda each: (order_of(each[0][0]), each[0][1])):
            group = group_of(name)
            if life.whole:
                self._members.setdefault(group, {})[name] = life
            elif life.start_us >= 0:
                self._seen.setdefault(group, {})[name] = life.ran_us
        self._spreads: dict[bool, list[tuple[float, Life]]] = {False: [], True: []}
        """Held out or not to each recorded life and how far it is from the mean logarithm of its group."""
        self._groups: dict[bool, list[str]] = {False: [], True: []}
        """The same to the groups of which enough is known that another can take their lives."""
        for group, found in self._members.items():
            center = statistics.fmean(_log(each.ran_us) for each in found.values())
            self._spreads[_held_out(group)] += [(_log(each.ran_us) - center, each) for each in found.values()]
            if group not in self._seen or len(found) >= recording.began.config.scheduler.N:
                self._groups[_held_out(group)].append(group)
        for held_out, groups in self._groups.items():
            if not groups:
                groups += [each for each in self._members if _held_out(each) == held_out]
        self._longest = {
            held_out: max((each.ran_us for _, each in spreads), default=0)
            for held_out, spreads in self._spreads.items()
        }

    def __repr__(self) -> str:
        return f"<Lives [{len(self._lives)} recorded, {len(self._known)} asked for]>"

    def of(self, execution: str, attempt: int) -> Lived:
        """Raises BadLogFile when no execution ended in the recording."""
        key = execution, attempt
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._find(execution, attempt)
        return found

    def _find(self, execution: str, attempt: int) -> Lived:
        life = self._lives.get((execution, attempt))
        if life is not None and life.whole:
            return Lived(life=life, ran_us=life.ran_us, how="recorded")
        seen_us = life.ran_us if life is not None else 0
        drawn = self._draw(execution, seen_us)
        if life is not None and life.finished is not None:
            # It ended, and the log before the rest of it was told.
            return Lived(life=_together(life, drawn.life), ran_us=life.ran_us, how="recorded")
        return drawn

    def _draw(self, execution: str, seen_us: int) -> Lived:
        group = group_of(execution)
        held_out = _held_out(group)
        if not self._groups[held_out]:
            if not self._groups[not held_out]:
                raise BadLogFile(
                    "no execution is recorded from its start to its score",
                    where=self._run,
                    remedy="use a longer recording: what isn't recorded is drawn from what is",
                )
            held_out = not held_out
        how: How = "prolonged" if seen_us else "drawn"
        siblings = [each for name, each in self._members.get(group, {}).items() if name != execution]
        rng = random.Random(f"{self._run}:{execution}")
        if siblings:
            center = statistics.fmean(_log(each.ran_us) for each in siblings)
            found = [
                (ran_us, life)
                for spread, life in self._spreads[held_out]
                if (ran_us := min(self._longest[held_out], round(math.exp(center + spread)))) > seen_us
            ]
        else:
            groups = [each for each in self._groups[held_out] if self._fits(each, group)] or self._groups[held_out]
            taken = random.Random(f"{self._run}:{group}").choice(groups)
            lived = self._member(taken, execution)
            if lived.ran_us > seen_us:
                return Lived(life=lived.life, ran_us=lived.ran_us, how=how)
            found = [(each.ran_us, each) for each in self._members[taken].values() if each.ran_us > seen_us]
        if not found:
            found = [(each.ran_us, each) for _, each in self._spreads[held_out] if each.ran_us > seen_us]
        if not found:
            # Nobody lasted longer: it ends right after it was seen last.
            longest = max((each for _, each in self._spreads[held_out]), key=lambda each: each.ran_us)
            return Lived(life=longest, ran_us=seen_us + 1, how=how)
        ran_us, life = rng.choice(found)
        return Lived(life=life, ran_us=ran_us, how=how)

    def _fits(self, taken: str, group: str) -> bool:
        """Whether each member of the group that was cut off would have lasted as long as it was seen to."""
        return all(self._member(taken, name).ran_us > ran_us for name, ran_us in self._seen.get(group, {}).items())

    def _member(self, taken: str, execution: str) -> Lived:
        """The life in that group of the member with the execution's number."""
        names = sorted({*self._members[taken], *self._seen.get(taken, {})}, key=order_of)
        name = names[int(execution.rpartition(".")[2]) % len(names)]
        life = self._members[taken].get(name)
        # One that was given up there is prolonged as it would be itself: others of its group ended.
        return self.of(name, 0) if life is None else Lived(life=life, ran_us=life.ran_us, how="recorded")


def _together(life: Life, other: Life) -> Life:
    return msgspec.structs.replace(
        other,
        start_us=life.start_us,
        finished=life.finished,
        sealed=life.sealed or other.sealed,
        frozen=life.frozen or other.frozen,
        claims=life.claims or other.claims,
        verdicts=life.verdicts or other.verdicts,
    )


def _held_out(group: str) -> bool:
    return group.startswith("g-h")


def _log(ran_us: int) -> float:
    return math.log(max(1, ran_us))
