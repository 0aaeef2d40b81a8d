"""A request that is answered and recorded without proxy and engine: what a text becomes as a record, and in a dialect."""

from __future__ import annotations

import json
from typing import Any, Literal

from schemas.ids import call_id
from schemas.records import CallRecord, VersionSpan
from services.mesh.chat import ChatTokenizer
from services.proxy.conversation import Message, Request, encode_blocks, link
from services.proxy.dialects.dialect import Answer, Dialect
from services.proxy.encoder import Encoder
from services.proxy.tree import Place, Tree, answer_key
from tests.proxy.world import EXECUTION

Finish = Literal["stop", "length"]


class Recorder:
    """A policy that says what it is told to, and the tree of what it said."""

    def __init__(self, encoder: Encoder, tokenizer: ChatTokenizer) -> None:
        self.encoder, self.tokenizer, self.tree = encoder, tokenizer, Tree()

    def record(
        self, request: Request, place: Place, new: list[int], said: str, finish: Finish, *, calls_allowed: bool
    ) -> tuple[CallRecord, Message]:
        """The record of an answer to this request, which is in the tree then; `new` are the tokens that it adds."""
        ids = self.tokenizer.encode(said) + ([self.tokenizer.eos_token_id] if finish == "stop" else [])
        call = call_id(EXECUTION, 0, self.tree.next_index)
        turn = Message(role="assistant", blocks=self.encoder.parse(ids, new, call=call, calls_allowed=calls_allowed))
        record = CallRecord(
            call=call,
            execution=EXECUTION,
            attempt=0,
            index=self.tree.next_index,
            parent=place.parent.call if place.parent else None,
            input_ids=new,
            output_ids=ids,
            logprobs=[0.0] * len(ids),
            versions=[VersionSpan(version=0, start=0, end=len(ids))],
            temperature=1.0,
            finish=finish,
            cell="cell-0",
            role="main",
            request=request.digest,
            prefix=link(place.chain, answer_key(call, turn)).hex(),
            answer=encode_blocks(turn.blocks),
        )
        self.tree.add(record, turn)
        return record, turn

    def answer(self, dialect: Dialect, body: dict[str, Any], said: str, finish: Finish) -> tuple[CallRecord, Answer]:
        """The answer to a request's body, recorded, as the dialect gets it. Calls are calls whatever tools there are."""
        request = dialect.parse(json.dumps(body).encode(), {})
        place = self.tree.place(request.conversation)
        new = self.encoder.new_ids(request.conversation, place)
        record, turn = self.record(request, place, new, said, finish, calls_allowed=True)
        counts = {"prompt_tokens": len(new), "output_tokens": len(record.output_ids)}
        return record, Answer(asked=request, blocks=turn.blocks, finish=finish, created=1, **counts)
