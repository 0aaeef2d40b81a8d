"""`python -m replay.fault.catch FIRST COUNT`: seeds one after the other, a JSON line each, up to the first that violates.

For `replay.fault.planted`, which runs it in a copy of the code.
"""

from __future__ import annotations

import gc
import resource
import sys

import msgspec

from replay.fault.planted import Line
from replay.fault.run import simulate

MEMORY = 6 << 30
"""Bytes of address space: planted code may go in circles."""


def main(first: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for seed in range(first, first + count):
        outcome = simulate(seed)
        line = Line(
            seed=seed,
            digest=outcome.digest,
            violations=[str(violation) for violation in outcome.violations[:5]],
            invariants=sorted({violation.invariant for violation in outcome.violations}),
        )
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
        if line.violations:
            return
        del outcome
        gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
