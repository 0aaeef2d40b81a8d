"""Ids are short, ordered and human. One function makes each kind of id; nobody else formats one.

| id | example | orders by |
| --- | --- | --- |
| run | `r-20260102-0304-5f3a` | start time |
| group | `g-000012` | dispatch |
| execution | `e-000012.03` | group, then member |
| call | `c-000012.03-0-0007` | execution, attempt, call |
| cell | `cell-0` (the core) | index |
| engine of the separate pool | `pool-0` | index |
| measurement | `h-000004` | version that is measured |
| held-out execution | `e-h000004.03` | measurement, then member |
| proxy, where there are several | `proxy-0` | index |
| batch | `b-000007` | opening |
| micro-step | `m-000007.013` | batch, then enqueueing |
| burst | `u-000003` | opening |
| evaluation | `v-000012.03-0` | execution, attempt |
| timer | `t-supply-000004` | purpose, then arming |
"""

from __future__ import annotations

import hashlib
from datetime import datetime


def run_id(now: datetime, suffix: str) -> str:
    """`now` in UTC to the minute; `suffix` (letters and digits) tells runs of one minute apart."""
    return f"r-{now:%Y%m%d-%H%M}-{suffix}"


def group_id(index: int) -> str:
    return f"g-{index:06d}"


def execution_id(group_index: int, member: int) -> str:
    return f"e-{group_index:06d}.{member:02d}"


def measurement_id(version: int) -> str:
    return f"h-{version:06d}"


def held_out_id(version: int, member: int) -> str:
    """An execution of the measurement of `version`; it belongs to no group."""
    return f"e-h{version:06d}.{member:02d}"


def call_id(execution: str, attempt: int, index: int) -> str:
    """`index` counts the calls of one attempt from 0."""
    return f"c-{execution[2:]}-{attempt}-{index:04d}"


def cell_id(index: int) -> str:
    return f"cell-{index}"


def pool_id(index: int) -> str:
    """An engine of the separate rollout pool."""
    return f"pool-{index}"


def in_pool(cell: str) -> bool:
    """Whether it is an engine of the separate pool: it serves, and never trains."""
    return cell.startswith("pool-")


def cell_index(cell: str) -> int:
    return int(cell.rpartition("-")[2])


def proxy_ids(count: int) -> list[str]:
    """Instances of the proxy service where there are so many."""
    return ["proxy"] if count == 1 else [f"proxy-{index}" for index in range(count)]


def proxies_for(execution: str, count: int) -> list[str]:
    """Who looks after an execution: its own proxy, then those that seal it in that one's place, each in its turn.

    Rendezvous hashing: the same everywhere, from the id alone, and even over the proxies."""
    return sorted(proxy_ids(count), key=lambda name: hashlib.blake2b(f"{execution}/{name}".encode()).digest())


def batch_id(index: int) -> str:
    return f"b-{index:06d}"


def micro_step_id(batch: str, index: int) -> str:
    return f"m-{batch[2:]}.{index:03d}"


def burst_id(index: int) -> str:
    return f"u-{index:06d}"


def timer_id(purpose: str, index: int) -> str:
    return f"t-{purpose}-{index:06d}"


def evaluation_id(execution: str, attempt: int) -> str:
    """Id of the one evaluation of an attempt's preserved workspace."""
    return f"v-{execution[2:]}-{attempt}"


def order_of(name: str) -> tuple[int, str]:
    """Sorts ids of one kind in their order, also when their number outgrows its padding."""
    return len(name), name


def group_of(execution: str) -> str:
    """The group that an execution belongs to."""
    return f"g-{execution[2:].partition('.')[0]}"


def decision_id(run: str, decider: str, cause: int, index: int) -> str:
    """Id of decision number `index` that `decider` took on the event at stream sequence `cause`."""
    return f"{run}.{decider}.{cause}.{index}"
