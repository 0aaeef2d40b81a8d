"""The packer service: the decider in its shell, with the materialiser between a decision and its event.

LOG ── shell(Packer) ── materialiser ─> BLOBS ──> group.claimed, micro-step.enqueued, batch.stream-closed
"""

from __future__ import annotations

from services.mesh.service import Context, alone, announce
from services.mesh.shell import Shell
from services.packer.core.packing import Packer, fill_share
from services.packer.materialiser import Materialiser


async def serve(context: Context) -> None:
    """Runs until cancelled."""
    materialiser = Materialiser(bus=context.bus, run=context.run)
    shell = Shell(
        decider=Packer(),
        bus=context.bus,
        clock=context.clock,
        publisher=context.publisher,
        snapshot_every=context.snapshot_every,
        before_publish=materialiser,
        observe=lambda: context.health.read_to.set(shell.read_to),
    )

    def unclaimed() -> int:
        return sum(len(batch.unclaimed) for batch in shell.driver.state.batches)

    health = context.health
    health.ready = lambda: "" if shell.caught_up.is_set() else "reading the log"
    health.gauge("gyre_packer_fill_percent", "Tokens over room, all", lambda: 100 * fill_share(shell.driver.state))
    health.gauge("gyre_packer_tokens", "Tokens packed in this run", lambda: shell.driver.state.packed_tokens)
    health.gauge("gyre_packer_padding_tokens", "Tokens in arrays beyond the rows'", lambda: materialiser.padding)
    health.gauge("gyre_packer_micro_steps_made", "Micro-steps made by this process", lambda: materialiser.made)
    health.gauge("gyre_packer_unclaimed", "Micro-steps that wait for a cell", unclaimed)
    await alone(context)
    await announce(context)
    await shell.run()
