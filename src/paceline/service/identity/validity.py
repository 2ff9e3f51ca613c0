"""Computes the remaining share of a certificate's lifetime without the package cryptography."""

from __future__ import annotations

import datetime
import re
import ssl

# A certificate's Validity (RFC 5280): two times in UTC, of years before 2050.
_VALIDITY = re.compile(rb"\x30\x1e\x17\x0d(\d{12})Z\x17\x0d(\d{12})Z")
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)


def life_left(pem: str, now: datetime.datetime) -> float:
    """Returns the largest remaining share of lifetime, 0 to 1, among the certificates in a PEM file.

    Raises:
        ValueError: there is no certificate whose days can be read.
    """
    matches = [_VALIDITY.search(ssl.PEM_cert_to_DER_cert(block)) for block in _PEM.findall(pem)]
    spans = [(_time(match[1]), _time(match[2])) for match in matches if match]
    if not spans:
        raise ValueError("no certificate whose days can be read")
    return max(max(0.0, min(1.0, (end - now) / (end - start))) for start, end in spans)


def _time(text: bytes) -> datetime.datetime:
    return datetime.datetime.strptime(text.decode(), "%y%m%d%H%M%S").replace(tzinfo=datetime.UTC)
