"""The run of the trajectories' tests serves the packer's too."""

from __future__ import annotations

from tests.trajectories.conftest import mesh as mesh
