"""Conditions over the named fields of the state: `w <= 12`, `cells[2].role == training and supply.ready >= 2`.

    names         those of `fields.FIELDS`; cells[2].role and pool[0].load for those of `CELL_FIELDS`
    values        numbers, "words" in quotes, true, false; the names of roles need no quotes
    operators     <= >= < > == !=, chained as in 10 <= w < 20; + - *; and, or, not; parentheses

Python's parser reads the text and nothing of it is run: what isn't in this list is refused, with its place. Types are
checked before a log is read. Where a field has no value (the batch's step without a batch) no comparison with it holds.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Literal, cast

import msgspec

from replay.debugging.fields import CELL_FIELDS, FIELDS, Type, Value, cell_of
from replay.debugging.moments import Moment
from replay.timeline.model import ROLES
from schemas.errors import ConfigError

LONGEST = 500
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_TRUTHS = {"true": True, "false": False, "True": True, "False": False}

Read = Callable[[Moment], Value]


class _Term(msgspec.Struct, frozen=True):
    read: Read
    type: Type


class Condition:
    """Call it with a moment. `names` are the fields that it asks for."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError for what is no condition over known fields."""
        self.text = text.strip()
        self.names: list[str] = []
        tree = self._parse()
        term = self._term(tree)
        if term.type != "yes or no":
            raise self._error("it is a value and no condition", tree, "compare it with something, as in w <= 12")
        self._read = term.read

    def __repr__(self) -> str:
        return f"<Condition {self.text}>"

    def __call__(self, moment: Moment) -> bool:
        return bool(self._read(moment))

    def told(self, moment: Moment) -> dict[str, Value]:
        """Its fields as they stand."""
        return {name: self._named(name, moment) for name in dict.fromkeys(self.names)}

    def _named(self, name: str, moment: Moment) -> Value:
        if name in FIELDS:
            return FIELDS[name].read(moment)
        return self._term(ast.parse(name, mode="eval").body).read(moment)

    def _parse(self) -> ast.expr:
        if not self.text:
            raise self._error("it is empty", None, "give a condition, as in w <= 12")
        if len(self.text) > LONGEST:
            raise ConfigError(f"it is longer than {LONGEST} characters", where="--until", remedy="make it shorter")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                return ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            place = f" at character {error.offset}" if error.offset else ""
            hint = "write == to compare" if "==" in (error.msg or "") else "write it as in w <= 12 and batch.step == 3"
            raise self._error(f"it cannot be read{place}", None, hint) from None
        except (ValueError, RecursionError, MemoryError, Warning):
            raise self._error("it cannot be read", None, "write it as in w <= 12 and batch.step == 3") from None

    def _term(self, node: ast.expr) -> _Term:
        if isinstance(node, ast.BoolOp):
            return self._logic(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return self._arithmetic(node)
        if isinstance(node, ast.Constant):
            return self._constant(node)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._name(node)
        raise self._error(
            f"{ast.unparse(node)} is nothing that a condition may hold",
            node,
            "use names of fields, numbers, comparisons, and, or, not, + - *",
        )

    def _logic(self, node: ast.BoolOp) -> _Term:
        reads = [self._typed(each, "yes or no").read for each in node.values]
        combine = all if isinstance(node.op, ast.And) else any
        return _Term(lambda moment: combine(read(moment) for read in reads), "yes or no")

    def _unary(self, node: ast.UnaryOp) -> _Term:
        if isinstance(node.op, ast.Not):
            read = self._typed(node.operand, "yes or no").read
            return _Term(lambda moment: not read(moment), "yes or no")
        number = self._typed(node.operand, "number").read
        if isinstance(node.op, ast.USub):
            return _Term(_lifted(operator.neg, number), "number")
        raise self._error(f"{ast.unparse(node)} is nothing that a condition may hold", node, "use not, or a minus")

    def _comparison(self, node: ast.Compare) -> _Term:
        terms = [self._term(each) for each in (node.left, *node.comparators)]
        pairs: list[Read] = []
        for index, op in enumerate(node.ops):
            compare = _COMPARE.get(type(op))
            left, right = terms[index], terms[index + 1]
            if compare is None:
                raise self._error("it compares in a way that is unknown here", node, f"use {' '.join(SIGNS)}")
            if left.type != right.type:
                raise self._error(
                    f"{ast.unparse(node)} compares a {left.type} with a {right.type}", node, _like(left, right)
                )
            if left.type != "number" and not isinstance(op, ast.Eq | ast.NotEq):
                raise self._error(f"{ast.unparse(node)} orders what has no order", node, "use == or !=")
            pairs.append(_lifted(compare, left.read, right.read))
        return _Term(lambda moment: all(read(moment) for read in pairs), "yes or no")

    def _arithmetic(self, node: ast.BinOp) -> _Term:
        left, right = self._typed(node.left, "number"), self._typed(node.right, "number")
        return _Term(_lifted(_ARITHMETIC[type(node.op)], left.read, right.read), "number")

    def _constant(self, node: ast.Constant) -> _Term:
        value = node.value
        if isinstance(value, bool):
            return _Term(lambda moment: value, "yes or no")
        if isinstance(value, int | float):
            return _Term(lambda moment: value, "number")
        if isinstance(value, str):
            return _Term(lambda moment: value, "word")
        raise self._error(f"{ast.unparse(node)} is no number and no word", node, "use numbers, or words in quotes")

    def _name(self, node: ast.Name | ast.Attribute) -> _Term:
        text = ast.unparse(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Subscript):
            return self._cell(node, node.value)
        if text in FIELDS:
            self.names.append(text)
            return _Term(FIELDS[text].read, FIELDS[text].type)
        if text in ROLES:
            return _Term(lambda moment: text, "word")
        if text in _TRUTHS:
            return _Term(lambda moment: _TRUTHS[text], "yes or no")
        raise self._unknown(text, node)

    def _cell(self, node: ast.Attribute, inner: ast.Subscript) -> _Term:
        text, group, index = ast.unparse(node), inner.value, inner.slice
        if not isinstance(group, ast.Name) or group.id not in ("cells", "pool"):
            raise self._unknown(text, node)
        if not isinstance(index, ast.Constant) or type(index.value) is not int:
            raise self._error(f"{text}: a cell is named by its number", node, "write cells[2].role")
        if node.attr not in CELL_FIELDS:
            raise self._unknown(text, node)
        field, number, of = CELL_FIELDS[node.attr], index.value, cast(Literal["cells", "pool"], group.id)
        self.names.append(text)

        def read(moment: Moment) -> Value:
            cell = cell_of(moment.state, of, number)
            return field.read(cell) if cell is not None else None

        return _Term(read, field.type)

    def _typed(self, node: ast.expr, type: Type) -> _Term:
        term = self._term(node)
        if term.type != type:
            raise self._error(f"{ast.unparse(node)} is a {term.type}, and a {type} is needed", node, _WANTED[type])
        return term

    def _unknown(self, text: str, node: ast.expr) -> ConfigError:
        cells = {f"cells[{number}].{name}" for number in range(3) for name in CELL_FIELDS}
        near = get_close_matches(text, [*FIELDS, *sorted(cells)], 1)
        hint = f"did you mean {near[0]}? " if near else ""
        return self._error(f"no field is called {text}", node, f"{hint}{known()}")

    def _error(self, what: str, node: ast.expr | None, remedy: str) -> ConfigError:
        at = f", character {node.col_offset + 1}" if node is not None else ""
        return ConfigError(what, where=f"--until {self.text!r}{at}", remedy=remedy)


SIGNS = ("<=", ">=", "<", ">", "==", "!=")
_WANTED: dict[Type, str] = {
    "yes or no": "compare it with something, as in w <= 12",
    "number": "use a number, or a field that is one",
    "word": "put words in quotes",
}


def known() -> str:
    """All names, for whoever asked for another."""
    return f"there are {', '.join(FIELDS)}; cells[I] and pool[I] with .{', .'.join(CELL_FIELDS)}"


def _lifted(apply: Callable[..., Any], *reads: Read) -> Read:
    """With nothing for nothing: what is compared with it does not hold."""

    def read(moment: Moment) -> Value:
        found = [each(moment) for each in reads]
        return None if None in found else apply(*found)

    return read


def _like(left: _Term, right: _Term) -> str:
    return "put words in quotes" if "word" in (left.type, right.type) else "compare like with like"
