"""Streams, subjects and headers of a run.

LOG      `gyre.{run}.{owner}.{entity}.{id}.{verb}`   every fact and decision, kept, append-only
RECORDS  `rec.{run}.{execution}.{attempt}.{call}`    one call record a model call; `closed` and `given-up` in its place
BLOBS    an object store                             packed micro-steps, trees, workspaces, snapshots

An id may hold a dot (`e-000012.03`), which makes two tokens of it: filters for a whole group come for free.
"""

from __future__ import annotations


def log_stream(run: str) -> str:
    return f"LOG_{run}"


def records_stream(run: str) -> str:
    return f"RECORDS_{run}"


def blob_bucket(run: str) -> str:
    return f"BLOBS_{run}"


def log_subjects(run: str) -> str:
    return f"gyre.{run}.>"


def records_subjects(run: str) -> str:
    return f"rec.{run}.>"


def subject(run: str, owner: str, kind: str, entity_id: str) -> str:
    """LOG subject of an event of `kind` (`entity.verb`)."""
    entity, _, verb = kind.partition(".")
    return f"gyre.{run}.{owner}.{entity}.{entity_id}.{verb}"


def owner_filter(run: str, owner: str) -> str:
    """Everything one service says: the fence of a decider."""
    return f"gyre.{run}.{owner}.>"


def about(run: str, *entities: str, owner: str = "*") -> list[str]:
    """Filters of everything that anybody says about entities of these kinds, or that one service says."""
    return [f"gyre.{run}.{owner}.{entity}.>" for entity in entities]


def chain_filter(run: str, owner: str, entity: str, entity_id: str) -> str:
    """Everything one service says about one entity: where each link expects the one before."""
    return f"gyre.{run}.{owner}.{entity}.{entity_id}.>"


def aggregate_filter(run: str, entity: str, entity_id: str) -> str:
    """Everything said about one entity by anybody: the scope of a claim."""
    return f"gyre.{run}.*.{entity}.{entity_id}.>"


def record_subject(run: str, execution: str, attempt: int, call: str) -> str:
    return f"rec.{run}.{execution}.{attempt}.{call}"


def closed_subject(run: str, execution: str, attempt: int) -> str:
    """Of the entry after which no call of the attempt is stored."""
    return f"rec.{run}.{execution}.{attempt}.closed"


def given_up_subject(run: str, execution: str, attempt: int) -> str:
    """Of requests that get no answer because they take engines with them."""
    return f"rec.{run}.{execution}.{attempt}.given-up"


def records_filter(run: str, execution: str, attempt: int) -> str:
    return f"rec.{run}.{execution}.{attempt}.>"


def tree_blob(execution: str, attempt: int) -> str:
    return f"tree/{execution}.{attempt}"


def workspace_blob(execution: str, attempt: int) -> str:
    return f"workspace/{execution}.{attempt}"


def micro_step_blob(micro_step: str) -> str:
    return f"micro-step/{micro_step}"


def snapshot_blob(decider: str) -> str:
    return f"snapshot/{decider}"
