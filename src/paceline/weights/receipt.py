"""Records what a rank or a service sent or received in a push, and how long that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgpack

from paceline.core.errors import InvalidMessageError
from paceline.weights.digest.agreement import DigestReport

RECEIPT_SCHEMA: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReceipt:
    """One part of the push of `version`.

    Attributes:
        version: the policy version that was sent or received.
        reports: the digests. A rollout server has one report per TP rank, with every slice of its live
            parameters. The learner has one report for all ranks, at its rank 0.
        num_bytes: bytes that a learner sent or a rollout server received.
        relayed_bytes: bytes passed on to other rollout ranks.
        transfer_ms: for a learner, the time from the first packing until the last message has left, digests
            included; for a rollout rank, the time until the last element is in its parameters.
        digest_ms: time of the digest, on the device if there is one.
        peak_extra_bytes: staging memory, in addition to the parameters.
    """

    version: int
    reports: tuple[DigestReport, ...]
    num_bytes: int
    relayed_bytes: int
    transfer_ms: float
    digest_ms: float
    peak_extra_bytes: int

    @staticmethod
    def merge(receipts: Sequence[PushReceipt]) -> PushReceipt:
        """Merges the receipts of ranks: all reports, the sum of bytes, the largest times and staging.

        Raises:
            ValueError: there are no receipts, or their versions differ.
        """
        versions = {receipt.version for receipt in receipts}
        if len(versions) != 1:
            raise ValueError(f"receipts to merge must be of one version, got {sorted(versions)}")
        return PushReceipt(
            version=versions.pop(),
            reports=tuple(report for receipt in receipts for report in receipt.reports),
            num_bytes=sum(receipt.num_bytes for receipt in receipts),
            relayed_bytes=sum(receipt.relayed_bytes for receipt in receipts),
            transfer_ms=max(receipt.transfer_ms for receipt in receipts),
            digest_ms=max(receipt.digest_ms for receipt in receipts),
            peak_extra_bytes=max(receipt.peak_extra_bytes for receipt in receipts),
        )

    def to_bytes(self) -> bytes:
        """Returns the receipt as one msgpack message."""
        reports = [report.to_bytes() for report in self.reports]
        counts = [self.num_bytes, self.relayed_bytes, self.peak_extra_bytes]
        times = [float(self.transfer_ms), float(self.digest_ms)]
        packed: bytes = msgpack.packb([RECEIPT_SCHEMA, self.version, reports, counts, times])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> PushReceipt:
        """Reads what `to_bytes` wrote; raises InvalidMessageError if anything is malformed."""
        try:
            schema, version, reports, counts, times = msgpack.unpackb(data)
            if schema != RECEIPT_SCHEMA or any(
                type(count) is not int or count < 0 for count in [version, *counts]
            ):
                raise ValueError(f"need schema {RECEIPT_SCHEMA}, a version and counts that are not negative")
            if any(type(time) is not float or not time >= 0 for time in times):
                raise ValueError(f"times must be floats that are not negative, got {times}")
            num_bytes, relayed_bytes, peak_extra_bytes = counts
            transfer_ms, digest_ms = times
            return cls(
                version=version,
                reports=tuple(DigestReport.from_bytes(report) for report in reports),
                num_bytes=num_bytes,
                relayed_bytes=relayed_bytes,
                transfer_ms=transfer_ms,
                digest_ms=digest_ms,
                peak_extra_bytes=peak_extra_bytes,
            )
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise InvalidMessageError(f"push receipt: {error}", reason="bad_receipt") from error
