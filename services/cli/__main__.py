"""`python -m services.cli` is `gyre`."""

from __future__ import annotations

from services.cli.app import main

main()
