"""Records into frozen trees: provenance, leaves, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from schemas.errors import LogBroken
from schemas.records import Delivery, GivenUp, VersionSpan
from services.mesh.tree_codec import decode_tree, digest_records, encode_tree
from services.trajectories.tree import counts_of, freeze, leaves_of
from tests.trajectories.trees import record

E = "e-000000.00"


def test_nodes_are_deltas_in_stored_order() -> None:
    records = [record(index=0), record(index=1, parent=0), record(index=3, role="sub-agent"), record(index=2, parent=0)]
    tree = freeze(E, 1, records)
    assert [node.parent for node in tree.nodes] == [-1, 0, -1, 0]
    assert [node.input_ids for node in tree.nodes] == [r.input_ids for r in records]
    counts = counts_of(tree, blob="b", digest="d")
    assert counts.tokens == [5, 5, 5, 5] and counts.trainable == [2, 2, 2, 2]
    assert counts.leaves == [1, 2, 3] and counts.classes == [0, 2, 0]
    assert decode_tree(encode_tree(tree)) == tree


def test_only_what_was_delivered_trains() -> None:
    late = Delivery(call=record(index=2).call, execution=E, attempt=1)
    tree = freeze(
        E,
        1,
        [record(index=0), record(index=1, parent=0, delivered=False), record(index=2, delivered=False), late],
    )
    assert [node.trainable for node in tree.nodes] == [True, False, True]
    assert counts_of(tree, blob="b", digest="d").trainable == [2, 0, 2]


def test_an_answer_that_nobody_took_ends_no_trajectory() -> None:
    lost = record(index=1, parent=0, delivered=False)
    assert leaves_of(freeze(E, 1, [record(index=0), lost])) == [0]
    assert leaves_of(freeze(E, 1, [record(index=0), lost, record(index=2, parent=1)])) == [2]
    assert leaves_of(freeze(E, 1, [record(index=0, delivered=False)])) == []


def test_a_call_stored_twice_is_one_node() -> None:
    again = [record(index=0), record(index=0), record(index=1, parent=0), record(index=1, parent=0)]
    assert freeze(E, 1, again) == freeze(E, 1, [again[0], again[2]])


def test_no_records_is_a_tree_without_nodes() -> None:
    assert counts_of(freeze(E, 1, []), blob="b", digest="d").leaves == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parent": "c-nobody"}, "parent c-nobody wasn't stored"),
        ({"logprobs": [-1.0]}, "1 log-probabilities for 2"),
        ({"versions": [VersionSpan(version=0, start=0, end=1)]}, "cover 1 of 2"),
        ({"versions": [VersionSpan(version=0, start=1, end=2)]}, "jump from 0 to 1"),
        ({"input_ids": []}, "root without input"),
        ({"attempt": 2}, "attempt 2"),
    ],
)
def test_a_wrong_record_is_named(change: dict[str, object], says: str) -> None:
    wrong = msgspec.structs.replace(record(index=0), **change)
    with pytest.raises(LogBroken, match=says) as caught:
        freeze(E, 1, [wrong])
    assert wrong.call in caught.value.where


def test_a_delivery_of_nothing_is_refused() -> None:
    with pytest.raises(LogBroken, match="delivered before"):
        freeze(E, 1, [Delivery(call="c-x", execution=E, attempt=1)])


def test_a_request_that_was_given_up_is_no_node() -> None:
    given_up = GivenUp(execution=E, attempt=1, request="r", prompt_tokens=9, cells=["cell-0"] * 3)
    assert freeze(E, 1, [given_up, record(index=0)]) == freeze(E, 1, [record(index=0)])


def test_the_digest_covers_order_and_content() -> None:
    assert digest_records([b"ab", b"c"]) != digest_records([b"c", b"ab"])
    assert len(digest_records([])) == 32
