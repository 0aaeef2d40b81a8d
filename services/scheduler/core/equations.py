"""The paper's equations of the scheduling plane, one function each, on plain numbers.

| symbol | meaning |
| --- | --- |
| d, p, f | executions dispatched, started, finished so far |
| w | waterlevel d - f |
| a | executions placed and not yet started |
| e | held-out executions placed and not finished; they are in none of the above |
| K, k | cells, cells not serving (training or in transition) |
| N | executions that a group is dispatched with, those that oversampling adds included |
| C_e, C_s, C_R | executions that one cell, the separate pool, and all serving engines take |
"""

from __future__ import annotations

from schemas.units import Check, check

WATERLEVEL = "waterlevel (2)"


def capacity(*, C_s: int, K: int, k: int, C_e: int) -> int:
    """Equation (1): C_R = C_s + (K - k) C_e. A cell in transition serves nobody, so it counts in k."""
    return C_s + (K - k) * C_e


def waterlevel(*, d: int, f: int) -> int:
    """w = d - f (section 'Boundary dispatch and waterlevel control'): queued and running executions."""
    return d - f


def startable(*, d: int, p: int, f: int, a: int, C_R: int, e: int = 0) -> int:
    """The start rule: min(d - p - a, C_R - e - (p - f) - a), never below zero; held-out executions hold `e` slots."""
    return max(0, min(d - p - a, C_R - e - (p - f) - a))


def waterlevel_allows(*, w: int, C_R: int, C_e: int) -> Check:
    """Equation (2): w <= C_R - C_e, what is outstanding still fits when C_e fewer are served: one cell, or several."""
    return check(WATERLEVEL, w, "<=", C_R - C_e)


def supply(*, ready: int, need: int, rho_min: float, B: int) -> Check:
    """The supply check: ready and unclaimed groups, capped by what the batch still needs, are at least rho_min B."""
    return check("supply rho_min B", min(ready, need), ">=", rho_min * B)


def supplied_for(*, since_us: int, now_us: int, tau_s: float) -> Check:
    """The supply check held without a break for tau. Only the timer decides that; this tells how far it is."""
    return check("supply for tau", (now_us - since_us) / 1e6, ">=", tau_s)


def whole_burst(*, ready: int, steps: int, B: int) -> Check:
    """Without streaming: the groups of the steps that are left, mu B at the burst's start, are ready or in the batch."""
    return check("groups of the burst mu B", ready, ">=", steps * B)


def core_retention(*, w: int, mu: int, N: int, B: int, C_s: int, K: int, C_e: int) -> Check:
    """Equation (3): w + mu N B <= C_s + (K - 1) C_e, the next burst fits without the core."""
    return check("core retention (3)", w + mu * N * B, "<=", C_s + (K - 1) * C_e)


def initial_dispatch(*, phi: float, mu: int, B: int) -> int:
    """Groups dispatched at the start: (phi + mu) B, a whole number."""
    return round(phi * B) + mu * B


def mean_staleness(*, phi: float, mu: int) -> float:
    """E[d] = phi + (mu - 1) / 2 (appendix A, theorem A.1)."""
    return phi + (mu - 1) / 2
