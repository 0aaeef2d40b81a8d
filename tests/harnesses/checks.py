"""What must hold of the records of a whole task, whichever harness did it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from schemas.records import CallRecord
from services.mesh.chat import ChatTokenizer
from tests.harnesses.stage import Stage


def shape(by_name: Mapping[str, CallRecord]) -> list[str]:
    """Every path from a root to a leaf, as a line of its names. A path changes its role only at a summary, its leaf."""
    names = {record.call: name for name, record in by_name.items()}
    parents = {record.parent for record in by_name.values()}
    lines = []
    for name, leaf in by_name.items():
        if leaf.call in parents:
            continue
        path, node = [name], leaf
        while node.parent is not None:
            node = by_name[names[node.parent]]
            assert (node.role, node.agent) == (leaf.role.removesuffix("-summary"), leaf.agent)
            path.insert(0, names[node.call])
        lines.append(f"{leaf.role}: {' > '.join(path)}")
    return sorted(lines)


def was_moved(stage: Stage, records: list[CallRecord], moving: bool) -> None:
    """Answers come from several engines, some of them from more than one; without moves from the first alone."""
    versions = {span.version for record in records for span in record.versions}
    if moving:
        assert sum(stage.moves.values()) >= 3 and len(versions) > 1, stage.moves
        assert any(len(record.versions) > 1 for record in records), "no answer was made by two engines"
    else:
        assert versions == {stage.engines[0].version}


def calls_are_unique(records: list[CallRecord], count: int) -> None:
    blocks: list[dict[str, Any]] = [block for record in records for block in json.loads(record.answer)]
    ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert len(ids) == len(set(ids)) == count


def prints_no_end(record: CallRecord, tokenizer: ChatTokenizer) -> None:
    """A tool printed an end token as text, or repeated its command; the only real one is that of the message."""
    assert record.input_ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(record.input_ids).count("<|im_end|>") > 1


def keeps(prompt: list[int], turn: list[int]) -> None:
    """A turn that is kept over a compaction stands in the prompt by its own ids, as context."""
    places = [start for start in range(len(prompt)) if prompt[start : start + len(turn)] == turn]
    assert len(places) == 1
