"""What both ends of a gRPC connection share: keep-alive, message limits, the token, names of metadata."""

from __future__ import annotations

ChannelOptions = list[tuple[str, str | int]]

DEFAULT_MAX_MESSAGE_BYTES = 64 * 2**20
TOKEN_KEY = "authorization"
TRACEPARENT_KEY = "traceparent"
TERM_KEY = "paceline-term"

KEEPALIVE_S = 10
KEEPALIVE_TIMEOUT_S = 5


def common_options(max_message_bytes: int) -> ChannelOptions:
    """Returns options of client and server, which notice a frozen peer after about 15 s, even without calls.

    With the keep-alive timeout alone, without `grpc.http2.ping_timeout_ms`, it takes more than a minute.
    """
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def bearer(token: str) -> str:
    """Returns the value of the authorization header."""
    return f"Bearer {token}"
