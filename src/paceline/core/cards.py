"""Facts about GPUs by name: memory, bandwidth, arithmetic, links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from paceline.core.errors import ConfigError

_MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A GPU's rates, as its vendor publishes them.

    Attributes:
        name: part of the name that the driver reports.
        num_bytes: size of its memory in bytes, as the driver counts them.
        bandwidth: memory bandwidth in bytes per second.
        flops: dense bfloat16 operations per second.
        link: bytes per second to another GPU of its host, in one direction.
        bus: bytes per second to the host's memory, in one direction.
        is_measured: whether training steps were timed on it; other cards are expected to reach the same share
            of their published rates.
    """

    name: str
    num_bytes: int
    bandwidth: float
    flops: float
    link: float
    bus: float
    is_measured: bool = False


_NVLINK, _PCIE = 450e9, 50e9
_GEN_4, _GEN_5 = 32e9, 64e9  # PCI Express with 16 lanes, by generation
_H100 = Card(
    name="H100",
    num_bytes=81_559 * _MIB,
    bandwidth=3.35e12,
    flops=989e12,
    link=_NVLINK,
    bus=_GEN_5,
    is_measured=True,
)
CARDS: Final[Mapping[str, Card]] = {
    card.name: card
    for card in (
        _H100,
        replace(_H100, name="H200", num_bytes=143_771 * _MIB, bandwidth=4.8e12),
        Card(name="A100", num_bytes=81_920 * _MIB, bandwidth=2.04e12, flops=312e12, link=300e9, bus=_GEN_4),
        Card(name="B200", num_bytes=183_359 * _MIB, bandwidth=8.0e12, flops=2250e12, link=900e9, bus=_GEN_5),
        Card(name="L40S", num_bytes=46_068 * _MIB, bandwidth=0.864e12, flops=362e12, link=_PCIE, bus=_GEN_4),
        Card(
            name="RTX 4090", num_bytes=24_564 * _MIB, bandwidth=1.008e12, flops=165e12, link=_PCIE, bus=_GEN_4
        ),
    )
}


def card_of(name: str) -> Card | None:
    """Returns the card that a driver's name ("NVIDIA H100 80GB HBM3") stands for; None if it is unknown."""
    return next((card for part, card in CARDS.items() if part in name), None)


def read_gpus(words: str) -> tuple[int, Card]:
    """Reads a number and a card from words such as "2xH100".

    Raises:
        ConfigError: the words have a different form, or the card is unknown.
    """
    match = re.fullmatch(r"(?:([1-9]\d*) *x *)?([a-zA-Z].*)", words.strip())
    card = None
    if match:
        wanted = match[2].casefold().replace(" ", "").replace("-", "")
        card = next((c for n, c in CARDS.items() if n.casefold().replace(" ", "") in wanted), None)
    if not match or card is None:
        raise ConfigError(
            f"{words!r} names no known GPUs; write a number and a card such as 2xH100, with one of "
            f"{', '.join(CARDS)}"
        )
    return int(match[1] or 1), card
