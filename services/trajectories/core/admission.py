"""Admission, equation (4): at most J_max root-to-leaf paths of a tree, each with targets that are frozen at its draw.

Pure over the counts in `execution.tree-frozen`. One draw is one pass over the nodes, parents first, so a tree of any
depth costs its size. Invariants: targets of different rows are disjoint; their union lies in what may be trained; the
class drawn from is the highest that has an unmasked target left; the same ids and seed give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

from schemas.events import ExecutionTreeFrozen
from schemas.units import RowPlan


def admit(tree: ExecutionTreeFrozen, *, execution: str, limit: int, seed: int) -> list[RowPlan]:
    """Rows of one execution in the order of their draws (equation 4, section 'Trajectory sampling').

    Each draw takes the highest class with unmasked target tokens, and in it one leaf in proportion to the unmasked
    target tokens on its path. The unmasked nodes of the path become the row's targets, then the whole path is masked.
    Ends when nothing is unmasked or after `limit` (J_max) rows.
    """
    unmasked = list(tree.trainable)
    lengths = _along_paths(tree.parents, tree.tokens)
    rows: list[RowPlan] = []
    while len(rows) < limit and any(unmasked):
        left = _along_paths(tree.parents, unmasked)
        open_leaves = [(kind, leaf) for leaf, kind in zip(tree.leaves, tree.classes, strict=True) if left[leaf]]
        if not open_leaves:
            break
        highest = min(kind for kind, _ in open_leaves)
        leaves = [leaf for kind, leaf in open_leaves if kind == highest]
        draw = len(rows)
        leaf = leaves[0]
        # A generator is dear where there is nothing to choose.
        if len(leaves) > 1:
            leaf = _draw(leaves, [left[leaf] for leaf in leaves], Random(f"{seed}:{execution}:{tree.attempt}:{draw}"))
        path = path_to(tree.parents, leaf)
        rows.append(
            RowPlan(
                execution=execution,
                attempt=tree.attempt,
                draw=draw,
                leaf=leaf,
                tokens=lengths[leaf],
                targets=left[leaf],
                target_nodes=[node for node in path if unmasked[node]],
            )
        )
        for node in path:
            unmasked[node] = 0
    return rows


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    path.reverse()
    return path


def _along_paths(parents: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Sum of the counts from the root to each node; a parent's index is below its child's."""
    sums: list[int] = []
    for parent, count in zip(parents, counts, strict=True):
        sums.append(count + (sums[parent] if parent >= 0 else 0))
    return sums


def _draw(leaves: Sequence[int], weights: Sequence[int], generator: Random) -> int:
    """One leaf in proportion to its weight, in whole numbers so that no rounding can differ between machines."""
    ends = list(accumulate(weights))
    point = generator.randrange(ends[-1])
    return next(leaf for leaf, end in zip(leaves, ends, strict=True) if point < end)
