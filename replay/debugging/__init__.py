"""Debugging of a recorded run: where it stood, why a cell was in its role, the life of an entity, two runs side by side.

    moments      the scheduler's state after any event, and the points of a log that people name
    fields       the state's named fields, which views show and breakpoints ask for
    breakpoints  conditions over these fields
    why_cell     why a cell was in its role, and what held it back
    life         what became of an execution, a group, a batch, a micro-step
    difference   where two runs part

Everything reads a log once, in order, and stops where it knows enough; memory follows what is open in the run, not the log.
"""
