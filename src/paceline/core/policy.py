"""Policy versions: which weights a token was drawn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTag:
    """A version number and the digest of the weights that it names.

    `version` counts optimizer steps of the run (0: the starting model); `digest` is 16 hexadecimal digits over every
    bit of every parameter in the wire dtype. Two tags are the same policy only if both agree.
    """

    version: int
    digest: str

    def __str__(self) -> str:
        return f"v{self.version}@{self.digest}"
