"""Push receipts: several ranks' as one, and what is refused when they are read."""

from __future__ import annotations

import msgpack
import pytest

from paceline.core.errors import InvalidMessageError
from paceline.weights.digest.agreement import DigestReport, SliceDigest
from paceline.weights.geometry.boxes import Box
from paceline.weights.receipt import PushReceipt


def receipt(rank: int, **changes: object) -> PushReceipt:
    part = SliceDigest(name="w", global_shape=(4,), box=Box((rank,), (rank + 1,)), value=2**64 - 1 - rank)
    fields: dict[str, object] = {
        "version": 3,
        "reports": (DigestReport.of(rank=f"rollout rank {rank}", version=3, slices=(part,)),),
        "num_bytes": 100 + rank,
        "relayed_bytes": 10 * rank,
        "transfer_ms": 5.0 - rank,
        "digest_ms": 0.5 + rank,
        "peak_extra_bytes": 64 * (rank + 1),
    }
    return PushReceipt(**{**fields, **changes})  # type: ignore[arg-type]


def test_merging_adds_bytes_and_takes_the_largest_of_times_and_staging() -> None:
    merged = PushReceipt.merge([receipt(0), receipt(1)])
    assert [report.rank for report in merged.reports] == ["rollout rank 0", "rollout rank 1"]
    assert (merged.version, merged.num_bytes, merged.relayed_bytes) == (3, 201, 10)
    assert (merged.transfer_ms, merged.digest_ms, merged.peak_extra_bytes) == (5.0, 1.5, 128)


def test_receipts_of_several_versions_or_none_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"must be of one version, got \[3, 4\]"):
        PushReceipt.merge([receipt(0), receipt(1, version=4)])
    with pytest.raises(ValueError, match=r"must be of one version, got \[\]"):
        PushReceipt.merge([])


def test_a_receipt_comes_back_from_its_bytes() -> None:
    sent = PushReceipt.merge([receipt(0), receipt(1)])
    read = PushReceipt.from_bytes(sent.to_bytes())
    assert [report.slices for report in read.reports] == [report.slices for report in sent.reports]
    assert read.to_bytes() == sent.to_bytes()


@pytest.mark.parametrize(
    ("position", "value", "match"),
    [
        (0, 2, "need schema 1"),
        (1, -1, "not negative"),
        (2, [b"no report"], "digest report"),
        (2, 7, "not iterable"),
        (3, [1, 2], "not enough values"),
        (3, [1, 2, "3"], "not negative"),
        (4, [1.0, -1.0], "times must be"),
        (4, [1.0, float("nan")], "times must be"),
    ],
)
def test_a_malformed_receipt_is_refused(position: int, value: object, match: str) -> None:
    fields = msgpack.unpackb(receipt(0).to_bytes())
    fields[position] = value
    with pytest.raises(InvalidMessageError, match=match):
        PushReceipt.from_bytes(msgpack.packb(fields))


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(InvalidMessageError, match="push receipt"):
        PushReceipt.from_bytes(b"\xc1")
