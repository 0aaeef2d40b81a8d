"""The tree of one attempt of an execution: nodes are recorded calls, each a delta of tokens against its parent.

A request is placed by a chain of digests over its root (agent, system, tools) and its messages. The longest chain that
ends with a recorded answer is its parent; nothing matches at a root.

    root --user--> c0 --results--> c1          prompt of c1 = input(c0) + output(c0) + input(c1)
      `--user'--> c2                           a harness that drops a turn or compacts makes a sibling or a root

Invariants
- prompt of a node = concatenation along its parents; a parent is recorded before its children;
- an echoed assistant turn is taken for a recorded one by any of its call ids, all of which must belong to one turn,
  else by its content; it stands for the whole turn as it was sampled, whatever the harness rewrote;
- an undelivered answer is on nobody's path until it is delivered.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import is_

import msgspec

from schemas.records import CallRecord
from services.proxy.conversation import Conversation, Message, link

_PLACES = 32
"""Roots whose last conversation is remembered."""


class Node:
    """One recorded call. Everything but `delivered` is fixed."""

    __slots__ = (
        "answer",
        "call",
        "delivered",
        "depth",
        "finish",
        "index",
        "input_ids",
        "key",
        "line",
        "output_ids",
        "parent",
        "prefix",
        "prompt_tokens",
        "request",
        "turn",
    )

    def __init__(self, record: CallRecord, parent: Node | None, turn: Message) -> None:
        self.call, self.index, self.parent = record.call, record.index, parent
        self.input_ids, self.output_ids = array("i", record.input_ids), array("i", record.output_ids)
        self.depth: int = parent.depth + 1 if parent else 1
        self.line: list[bytes] = parent.line if parent else []
        """The first `depth` are the ids of each node from the root to this one as an engine is sent them, since they are
        sent again with every call after it. One list for a whole branch; a sibling begins one of its own."""
        if parent is not None and len(self.line) > parent.depth:
            self.line = self.line[: parent.depth]
        self.line.append(encode_ids(record.input_ids + record.output_ids))
        self.finish, self.request, self.answer = record.finish, record.request, record.answer
        self.prefix = bytes.fromhex(record.prefix)
        self.turn = turn
        self.key = answer_key(record.call, turn)
        self.delivered = record.delivered
        before = parent.tokens if parent else 0
        self.prompt_tokens: int = before + len(self.input_ids)

    @property
    def tokens(self) -> int:
        """Of its prompt and output."""
        return self.prompt_tokens + len(self.output_ids)

    def __repr__(self) -> str:
        return f"<Node {self.call} [{self.prompt_tokens} + {len(self.output_ids)}]>"

    def encoded_ids(self) -> list[bytes]:
        """`encode_ids` of prompt and output in parts: what a child's prompt begins with."""
        return self.line[: self.depth]


class Turn(msgspec.Struct, frozen=True):
    """A message that has to be encoded; `node` is the recorded turn that an assistant message stands for."""

    message: Message
    node: Node | None


class Place(msgspec.Struct, frozen=True):
    """Where a request belongs: its parent, the turns after it, and the chain up to its end."""

    parent: Node | None
    rest: Sequence[Turn]
    chain: bytes


def encode_ids(ids: Sequence[int]) -> bytes:
    """Inside of a JSON list of numbers: such parts are joined with commas. Empty for no ids."""
    return msgspec.json.encode(ids)[1:-1]


def answer_key(call: str, turn: Message) -> bytes:
    """Key of a recorded assistant turn: its call when it has call ids, which nobody rewrites, else its content."""
    return call.encode() if turn.call_ids else turn.key()


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages both begin with, the same objects. Mostly one is the other and more."""
    most = min(len(one), len(other))
    if all(map(is_, one[:most], other)):
        return most
    return next(index for index in range(most) if one[index] is not other[index])


class _Placed:
    """Messages of one conversation, and of each: its turn, the chain up to it, and the best parent so far."""

    __slots__ = ("chains", "messages", "parents", "strange", "turns")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.chains: list[bytes] = []
        self.parents: list[tuple[Node | None, int]] = []
        self.strange: dict[bytes, int] = {}
        """Key of each assistant turn that ends no recorded path to where it stands first."""

    def add(self, message: Message, turn: Turn, chain: bytes, parent: tuple[Node | None, int], key: bytes) -> None:
        if message.role == "assistant" and parent[1] <= len(self.messages):
            self.strange.setdefault(key, len(self.messages))
        self.messages.append(message)
        self.turns.append(turn)
        self.chains.append(chain)
        self.parents.append(parent)

    def cut(self, count: int) -> None:
        del self.messages[count:], self.turns[count:], self.chains[count:], self.parents[count:]
        if self.strange:
            self.strange = {key: index for key, index in self.strange.items() if index < count}


class Tree:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.by_request: dict[str, Node] = {}
        self._by_call: dict[str, Node] = {}
        self._by_prefix: dict[bytes, Node] = {}
        self._by_call_id: dict[str, Node] = {}
        self._by_content: dict[bytes, Node] = {}
        self._places: dict[bytes, _Placed] = {}
        """Where the last conversation from each root was placed, the least recently asked first."""

    def __repr__(self) -> str:
        roots = sum(node.parent is None for node in self.nodes)
        waiting = sum(not node.delivered for node in self.nodes)
        return f"<Tree [{len(self.nodes)} nodes, {roots} roots, {waiting} undelivered]>"

    @property
    def next_index(self) -> int:
        return self.nodes[-1].index + 1 if self.nodes else 0

    def node(self, call: str) -> Node:
        """The node of a recorded call; KeyError when there is none."""
        return self._by_call[call]

    def add(self, record: CallRecord, turn: Message) -> Node:
        """A stored record; `turn` is its answer. Records come in the order in which they were stored."""
        parent = self._by_call[record.parent] if record.parent is not None else None
        node = Node(record, parent, turn)
        self.nodes.append(node)
        self._by_call[node.call] = node
        self.by_request[node.request] = node
        if node.delivered:
            self._reveal(node)
        return node

    def deliver(self, call: str) -> None:
        """A client took the answer: later requests may continue it."""
        node = self._by_call[call]
        if not node.delivered:
            node.delivered = True
            self._reveal(node)
            self.forget_places()

    def place(self, conversation: Conversation) -> Place:
        """Where the next call of this conversation attaches. Costs no tokens, and of messages that the last request with
        this root had too (the same objects) a comparison each."""
        root, messages = conversation.key(), conversation.messages
        known = self._places.pop(root, None) or _Placed()
        self._places[root] = known
        while len(self._places) > _PLACES:
            del self._places[next(iter(self._places))]
        # Of the last message at the end of either nothing is kept: no answer is looked for there.
        same = _shared(known.messages[:-1], messages[:-1])
        known.cut(same)
        chain = known.chains[-1] if known.chains else root
        parent, start = known.parents[-1] if known.parents else (None, 0)
        last = len(messages) - 1
        for index in range(same, len(messages)):
            message, node = messages[index], None
            if message.role == "assistant":
                key, node = self._recognise(message)
            else:
                key = message.key()
            chain = link(chain, key)
            # An assistant message at the very end is to be continued, so it cannot be the parent of its own end.
            if message.role == "assistant" and index < last and (found := self._by_prefix.get(chain)):
                parent, start = found, index + 1
            known.add(message, Turn(message, node), chain, (parent, start), key)
        rest = known.turns[start:]
        if parent is not None:
            # A harness may echo parallel calls one by one, each with its result: what was sampled stands there once.
            rest = [turn for turn in rest if turn.node is not parent or not turn.message.call_ids]
        return Place(parent, rest, chain)

    def forget_places(self) -> None:
        """An answer that was not to be seen is there now: what was placed before may belong after it."""
        self._places.clear()

    def _recognise(self, message: Message) -> tuple[bytes, Node | None]:
        ids = message.call_ids
        owners = {id(node): node for call_id in ids if (node := self._by_call_id.get(call_id))}
        if len(owners) == 1:
            (node,) = owners.values()
            return node.key, node
        key = message.key()
        return key, None if ids else self._by_content.get(key)

    def _reveal(self, node: Node) -> None:
        self._by_prefix[node.prefix] = node
        for call_id in node.turn.call_ids:
            self._by_call_id[call_id] = node
        if node.turn.blocks and not node.turn.call_ids:
            self._by_content[node.key] = node
        for known in self._places.values():
            # What was nobody's turn may be this one.
            if (index := known.strange.get(node.key)) is not None:
                known.cut(index)
