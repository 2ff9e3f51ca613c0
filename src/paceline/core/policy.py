"""Policy versions: which weights a token was drawn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTag:
    """A version number and the digest of the weights that it names.

    `version` counts the run's optimizer steps (0: the starting model). `digest` is 16 hexadecimal digits over
    every bit of every parameter in the dtype of the push. Two tags name the same policy only if both fields
    agree.
    """

    version: int
    digest: str

    def __str__(self) -> str:
        return f"v{self.version}@{self.digest}"

    def staleness_in(self, step: int) -> int:
        """Returns how many versions it is behind the one that `step` trains, which is `step` - 1."""
        return step - 1 - self.version

    @classmethod
    def parse(cls, text: str) -> PolicyTag:
        """Reads the text that `str()` writes; raises ValueError on anything else."""
        version, _, digest = text.removeprefix("v").partition("@")
        return cls(version=int(version), digest=digest)
