"""Colours of pictures and page, on light and on dark ground.

Roles differ in brightness as well as in hue, lines in dash as well, so that they are told apart by colour-blind people and
in grey; hues are of the set that Okabe and Ito proposed.
"""

from __future__ import annotations

LIGHT = {
    "ground": "#ffffff",
    "panel": "#f5f6f8",
    "ink": "#1c1f24",
    "faint": "#5f6875",
    "grid": "#e3e6ea",
    "rollout": "#a9d3ee",
    "training": "#d55e00",
    "training-next": "#f29a45",
    "idle": "#fbe3c0",
    "leaving": "#2b2b2b",
    "returning": "#8a8a8a",
    "out": "#842e99",
    "away": "#5c5c6b",
    "level": "#005b96",
    "capacity": "#2c9a63",
    "ready": "#a3477f",
    "supply": "#e3b7d1",
    "bound": "#5f6875",
    "step": "#5f6875",
    "publication": "#111111",
    "found": "#d4006a",
}
DARK = {
    "ground": "#14171c",
    "panel": "#1d2128",
    "ink": "#e8eaee",
    "faint": "#a3abb8",
    "grid": "#2c323b",
    "rollout": "#2b5d84",
    "training": "#f07f23",
    "training-next": "#ffb366",
    "idle": "#5f4526",
    "leaving": "#f4f4f4",
    "returning": "#9b9b9b",
    "out": "#b84dff",
    "away": "#3d4047",
    "level": "#5aa9e6",
    "capacity": "#7fd88f",
    "ready": "#e39ac4",
    "supply": "#5c3a4e",
    "bound": "#a3abb8",
    "step": "#8a93a1",
    "publication": "#ffffff",
    "found": "#ff5fa8",
}
MEANING = {
    "rollout": "rollout",
    "training": "trains a micro-step (two tones: one batch, the next)",
    "idle": "training role, no micro-step",
    "leaving": "to training",
    "returning": "to rollout",
    "out": "put out of training",
    "away": "serves nobody",
}
"""What each state of a row is called in legends; training stands for training-next too."""


def variables(colours: dict[str, str]) -> str:
    """As CSS custom properties."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
