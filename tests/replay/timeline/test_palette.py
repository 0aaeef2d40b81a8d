"""Colours are told apart: by everybody, by colour-blind people, on light and on dark ground."""

from __future__ import annotations

import itertools

import pytest

from replay.timeline.palette import DARK, LIGHT, MEANING

# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
SEEN_AS = {
    "everybody": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
ROLES = [*MEANING, "training-next"]
Triple = tuple[float, float, float]


@pytest.mark.parametrize("eyes", SEEN_AS)
@pytest.mark.parametrize("ground", [LIGHT, DARK], ids=["light", "dark"])
def test_roles_differ_from_each_other(ground: dict[str, str], eyes: str) -> None:
    for one, other in itertools.combinations(ROLES, 2):
        assert _difference(ground[one], ground[other], eyes) > 14, (one, other)


@pytest.mark.parametrize("eyes", SEEN_AS)
@pytest.mark.parametrize("ground", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_and_text_stand_out_from_their_ground(ground: dict[str, str], eyes: str) -> None:
    for line in ("level", "capacity", "ready", "bound", "step", "publication", "ink", "faint"):
        for below in ("ground", "panel"):
            assert _difference(ground[line], ground[below], eyes) > 40, line
    assert _difference(ground["level"], ground["capacity"], eyes) > 14


@pytest.mark.parametrize("ground", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_the_contrast_that_readers_need(ground: dict[str, str]) -> None:
    """4.5 to 1, WCAG 2 level AA."""
    for text in ("ink", "faint"):
        for below in ("ground", "panel"):
            one, other = sorted((_luminance(ground[text]), _luminance(ground[below])))
            assert (other + 0.05) / (one + 0.05) >= 4.5


def test_both_grounds_have_the_same_colours() -> None:
    assert LIGHT.keys() == DARK.keys()


def _linear(colour: str) -> Triple:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return red, green, blue


def _luminance(colour: str) -> float:
    red, green, blue = _linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _lab(colour: str, eyes: str) -> Triple:
    rgb = _linear(colour)
    r, g, b = (min(1.0, max(0.0, sum(w * v for w, v in zip(row, rgb, strict=True)))) for row in SEEN_AS[eyes])
    xyz = (
        (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047,
        0.2126729 * r + 0.7151522 * g + 0.0721750 * b,
        (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883,
    )
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _difference(one: str, other: str, eyes: str) -> float:
    """CIE 1976."""
    pairs = zip(_lab(one, eyes), _lab(other, eyes), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5
