"""Policy versions, the weights from which tokens were drawn; and what of a vision tower trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

TrainedVision = Literal["none", "projector", "all"]
"""Which part of the policy's vision tower trains; the projector are its mergers."""


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
        """Returns how many versions the tag is behind the version that `step` trains, which is `step` - 1."""
        return step - 1 - self.version

    @classmethod
    def parse(cls, text: str) -> PolicyTag:
        """Reads the text that `str()` writes; raises ValueError on anything else."""
        version, _, digest = text.removeprefix("v").partition("@")
        return cls(version=int(version), digest=digest)


@dataclass(frozen=True, slots=True)
class PolicyRange:
    """The response tokens [first, end), which `policy` sampled."""

    policy: PolicyTag
    first: int
    end: int

    def to_plain(self) -> list[str | int]:
        """Returns policy, first token and end, as the journal records them."""
        return [str(self.policy), self.first, self.end]

    @classmethod
    def from_plain(cls, plain: Iterable[str | int]) -> PolicyRange:
        """Reads what `to_plain` returns; raises ValueError on anything else."""
        policy, first, end = plain
        return cls(PolicyTag.parse(str(policy)), int(first), int(end))


def range_fault(ranges: Iterable[PolicyRange], num_tokens: int | None = None) -> str:
    """Says what is wrong with the ranges of a response; "" if each begins where the one before it ends.

    Args:
        num_tokens: number of tokens of the response; None if unknown.
    """
    end, version = 0, -1
    for part in ranges:
        if part.first != end:
            what = "overlap" if part.first < end else "leave a hole"
            return f"the ranges of its tokens {what} at token {min(part.first, end)}"
        if part.end <= part.first:
            return f"the range of its tokens at {part.first} ends at {part.end}"
        if part.policy.version <= version:
            return f"version {part.policy.version} sampled tokens after version {version}"
        end, version = part.end, part.policy.version
    if num_tokens is not None and end != num_tokens:
        return f"the ranges of its tokens end at {end}, and it has {num_tokens}"
    return ""


def token_ages(ranges: Iterable[PolicyRange], step: int) -> tuple[float, float]:
    """Returns the mean and the greatest age of tokens, in versions behind the one that `step` trains."""
    counted = [(part.end - part.first, part.policy.staleness_in(step)) for part in ranges]
    num_tokens = sum(count for count, _ in counted)
    return sum(count * age for count, age in counted) / num_tokens, float(max(age for _, age in counted))
