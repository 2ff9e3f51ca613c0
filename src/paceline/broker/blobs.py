"""Reads blobs without an event loop, for the learner's ranks, which fetch their own rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from paceline.broker.address import REDIS_SCHEMES, redact, scheme_of
from paceline.broker.redis_errors import translate
from paceline.core.errors import ConfigError, LostDataError

_KEYS_PER_FETCH: Final = 64
_KEYS_NAMED: Final = 5


class BlobReader:
    """A synchronous connection that fetches blobs by key; a context manager.

    Args:
        url: the broker's redis address.
        timeout_s: longest wait for one request, which fetches at most 64 blobs.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        if scheme_of(url) not in REDIS_SCHEMES:
            raise ConfigError(
                f"blobs of {redact(url)!r} exist in one process only: set broker.url to redis://"
            )
        self._url, self._timeout_s = url, timeout_s
        self._client: redis.Redis = redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, 5.0),
            retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), retries=6),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Values in the order of the keys.

        Raises:
            LostDataError: blobs are missing; names them.
            BrokerError, DeadlineError: the broker is gone.
        """
        values: list[bytes | None] = []
        try:
            for start in range(0, len(keys), _KEYS_PER_FETCH):
                portion: Any = self._client.mget(keys[start : start + _KEYS_PER_FETCH])
                values += portion
        except (RedisError, OSError) as error:
            raise translate(error, url=self._url, command="MGET", timeout_s=self._timeout_s) from error
        present = [value for value in values if value is not None]
        if len(present) < len(keys):
            missing = [key for key, value in zip(keys, values, strict=True) if value is None]
            more = f" and {len(missing) - _KEYS_NAMED} more" if len(missing) > _KEYS_NAMED else ""
            raise LostDataError(
                f"{len(missing)} of {len(keys)} blobs are not at the broker {redact(self._url)}: "
                f"{', '.join(missing[:_KEYS_NAMED])}{more}; they were deleted, or the server lost its data"
            )
        return present

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()
