"""A trainer's process as the supervisor would start it. Run by test_satellite_processes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from services.mesh.processes import end
from services.mesh.service import open_context, run_service
from services.trainer.service import serve


async def main(url: str, run: str, folder: Path, cell: str) -> int:
    context = await open_context(
        url=url, run=run, service="trainer", folder=folder, cache=folder, here=folder, cell=cell
    )
    return await run_service(serve, context)


if __name__ == "__main__":
    sys.exit(end(asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]))))
