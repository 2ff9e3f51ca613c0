"""Scores by a remote service: cuts calls to size and repeats failed ones; every item gets a score."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import grpc

from paceline.config.reward import RewardConfig, RewardServiceConfig
from paceline.core.errors import (
    ConfigError,
    DeadlineError,
    EnvironmentLackError,
    PacelineError,
    PeerLostError,
    RewardError,
    RewardErrorKind,
)
from paceline.core.scoring import ScoreItem
from paceline.reward.outside.breaker import Breaker
from paceline.reward.remote.client import call_score
from paceline.reward.remote.handshake import Handshake
from paceline.reward.remote.merging import CallRequest, Merger, Results
from paceline.reward.remote.parts import CallItems, Cutter
from paceline.reward.scoring.scorer import ScorerSettings, to_nobody
from paceline.reward.scoring.scores import Score, failed, score_of
from paceline.reward.scoring.shape import Shape
from paceline.service.grpc import channels
from paceline.service.grpc.connection import DEFAULT_MAX_MESSAGE_BYTES
from paceline.service.identity.credentials import TLS_DIR, Credentials, TlsFiles

_log = logging.getLogger(__name__)

_REACH_TIMEOUT_S = 3.0  # how long the start waits for a service that cannot be reached
_SPLIT = 16
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0
# Share of the largest message, because UTF-8 and framing make an item larger than its number of characters.
_MESSAGE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteScorerOptions:
    """How a remote scorer is called.

    Args:
        address: host:port.
        shape: how the service's rewards enter the sum.
        timeout_s: deadline of one call.
        retry_for_s: for how long after an item's arrival further calls for it may begin.
        max_message_bytes: largest message; calls are cut to stay below it.
        credentials: the token, if the service asks for one, and the files for TLS.
        tls_name: name in the service's certificate; "": the name of Paceline's own reward services.
    """

    name: str
    address: str
    shape: Shape = field(default_factory=Shape)
    timeout_s: float = 10.0
    retry_for_s: float = 30.0
    max_items_per_call: int = 256
    concurrency: int = 16
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    credentials: Credentials = field(default_factory=Credentials)
    tls_name: str = ""


class _Fault(enum.Enum):
    """Why a call scored none of its items."""

    UNREACHABLE = enum.auto()
    SLOW = enum.auto()
    REFUSED = enum.auto()
    """The service answered with an error, possibly because of a single item."""

    FOR_GOOD = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """The result of a call: a score for each of its items, and the fault if there was one."""

    scores: Sequence[tuple[int, Score]]
    fault: _Fault | None = None
    was_merged: bool = False


class RemoteScorer:
    """A `Scorer` that asks one remote service. Whatever the service answers, every item gets a score."""

    def __init__(self, options: RemoteScorerOptions, notify: Callable[[str], None] = to_nobody) -> None:
        self.options, self.names, self.shape = options, [options.name], options.shape
        self._peer = f"reward service {options.name} at {options.address}"
        self._channel: grpc.aio.Channel | None = None
        max_chars = int(options.max_message_bytes * _MESSAGE_SHARE)
        self._cutter = Cutter(max_chars=max_chars, by_group=options.shape.group)
        self._merger = Merger(
            self._ask,
            concurrency=options.concurrency,
            # A bad item fails its whole call, so calls are merged only if they may be repeated without it.
            max_items=options.max_items_per_call if options.retry_for_s else 0,
            max_chars=max_chars,
        )
        self._breaker = Breaker(self._peer, notify)
        self._handshake = Handshake(self._peer, options.shape, timeout_s=options.timeout_s)

    @classmethod
    def configured(cls, settings: ScorerSettings) -> list[Self]:
        """Returns one scorer for each configured service.

        Raises:
            ConfigError: the file with a service's token, or its files for TLS, cannot be read.
        """
        return [cls(_options(service, settings), settings.notify) for service in settings.config.services]

    @property
    def version(self) -> str | None:
        """Returns the version that the service named; None if it has not done so on this connection."""
        return None if self._channel is None else self._handshake.version(self._channel)

    async def start(self) -> None:
        """Connects, and asks for the service's description; the service may also come up later."""
        options = self.options
        self._channel = channels.connect(
            options.address,
            credentials=options.credentials,
            role="reward",
            tls_name=options.tls_name,
            max_message_bytes=options.max_message_bytes,
        )
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                await self._channel.channel_ready()
            await self._handshake.shake(self._channel)
        except TimeoutError:
            _log.warning("%s cannot be reached (yet)", self._peer)
        except PacelineError as error:  # the service's items will get the error
            _log.error("%s", error)

    async def close(self) -> None:
        """Closes the connection to the service."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._merger.close()
            await channel.close()
            await self._handshake.close()

    async def score(self, items: Sequence[ScoreItem], *, run_id: str = "", step: int = 0) -> list[Score]:
        """Returns one score per item, in the order of the items, with the weight applied.

        Calls that ran out of time or were refused are repeated with fewer and fewer items, so that a slow or
        bad item does not make the others fail. Calls that did not reach the service, or that it was too busy
        for, are repeated unchanged. Items of several calls of this method go to the service together when its
        `concurrency` is used up.

        Raises:
            RewardError: UNAVAILABLE, when the connection is closed or was not opened.
        """
        until = time.monotonic() + self.options.retry_for_s
        scores = self._too_large(items)
        pending = [(place, item) for place, item in enumerate(items) if place not in scores]
        parts = self._cutter.cut(pending, self.options.max_items_per_call)
        pause_s = _FIRST_PAUSE_S
        while True:
            outcomes = await asyncio.gather(*(self._call(part, run_id, step, until) for part in parts))
            for outcome in outcomes:
                scores.update(outcome.scores)
            parts = self._again(parts, outcomes)
            if not parts or time.monotonic() + pause_s > until:
                return [scores[index] for index in range(len(items))]
            num_items = sum(len(part.items) for part in parts)
            _log.info("%s: %d items again in %.2f s", self.options.name, num_items, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _again(self, parts: Sequence[CallItems], outcomes: Sequence[_Outcome]) -> list[CallItems]:
        """Returns the calls to make next."""
        refuses_all = len(parts) > 1 and all(outcome.fault is _Fault.REFUSED for outcome in outcomes)
        again: list[CallItems] = []
        for part, outcome in zip(parts, outcomes, strict=True):
            match outcome.fault:
                case _Fault.UNREACHABLE:
                    again.append(part)
                case _Fault.SLOW | _Fault.REFUSED if outcome.was_merged:
                    again.append(replace(part, is_alone=True))
                case _Fault.SLOW | _Fault.REFUSED if len(self._cutter.units(part.items)) > 1:
                    if not (refuses_all and part.is_cut):
                        again += self._cutter.cut(part.items, max(1, len(part.items) // _SPLIT), is_cut=True)
        return again

    def _too_large(self, items: Sequence[ScoreItem]) -> dict[int, Score]:
        """Returns the errors of items whose groups do not fit into a call, by place."""
        limit = self.options.max_items_per_call
        scores: dict[int, Score] = {}
        for unit in self._cutter.units(list(enumerate(items))) if self._cutter.by_group else ():
            if len(unit) > limit:
                message = (
                    f"a group of {len(unit)} items does not fit into max_items_per_call={limit}: raise it"
                )
                for place, item in unit:
                    text = f"{self.options.name}: {message}"
                    scores[place] = failed(item.trajectory_id, RewardErrorKind.WRONG_TYPE, text)
        return scores

    async def _call(self, part: CallItems, run_id: str, step: int, until: float) -> _Outcome:
        """Makes one call; if it fails, each of its items gets the error as its score."""
        if self._channel is None:
            raise RewardError(f"{self._peer}: the connection is not open", kind=RewardErrorKind.UNAVAILABLE)
        options = self.options
        answer = await self._merger.ask(CallRequest(part=part, run_id=run_id, step=step, until=until))
        results, fault = answer.results, None
        if isinstance(results, PacelineError):
            fault = _fault_of(results)
            results = [self._explained(results)] * len(part.items)
        scores = [
            (index, score_of(item, result, name=options.name, shape=options.shape, seconds=answer.seconds))
            for (index, item), result in zip(part.items, results, strict=True)
        ]
        return _Outcome(scores=scores, fault=fault, was_merged=answer.was_merged)

    async def _ask(self, items: Sequence[ScoreItem], request: CallRequest) -> Results:
        channel = self._channel
        if channel is None:
            raise RewardError(f"{self._peer}: the connection is not open", kind=RewardErrorKind.UNAVAILABLE)
        if not await self._breaker.admit(request.until):
            raise PeerLostError(self._breaker.explanation, peer=self._peer)
        try:
            await self._handshake.shake(channel)
            refused = self._handshake.refused(items)
            asked = [item for item in items if item.trajectory_id not in refused]
            answers = iter(
                await call_score(
                    channel,
                    asked,
                    run_id=request.run_id,
                    step=request.step,
                    timeout_s=self.options.timeout_s,
                    peer=self._peer,
                )
            )
            results = [refused.get(item.trajectory_id) or next(answers) for item in items]
        except (DeadlineError, PeerLostError) as error:
            self._breaker.failed(str(error))
            self._handshake.forget()
            raise
        except PacelineError:
            self._breaker.succeeded()
            raise
        except BaseException:
            self._breaker.called_off()
            raise
        self._breaker.succeeded()
        return results

    async def check(self) -> None:
        """Asks for the service's description, if it can be reached.

        Raises:
            ConfigError: the service has another contract, or does not score what the configuration requires.
        """
        await self.start()
        await self.close()
        if self._handshake.problem is not None:
            raise ConfigError(self._handshake.problem)

    def _explained(self, error: PacelineError) -> PacelineError:
        """Returns the error; a refused token gets a hint for this service."""
        cause = error.__cause__
        if isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNAUTHENTICATED:
            return ConfigError(
                f"{self._peer} refused the token; name a file with its token as token_file of this entry of "
                "reward.services, or give this process and the service the same PACELINE_REWARD_TOKEN"
            )
        return error


def _fault_of(error: PacelineError) -> _Fault:
    match error:
        case DeadlineError():
            return _Fault.SLOW
        case PeerLostError():
            return _Fault.UNREACHABLE
        case ConfigError():
            return _Fault.FOR_GOOD
        case _:
            return _Fault.REFUSED


def _options(service: RewardServiceConfig, settings: ScorerSettings) -> RemoteScorerOptions:
    config: RewardConfig = settings.config
    credentials = settings.credentials.with_token_file(
        service.token_file,
        setting=f"token_file={service.token_file} of the reward service {service.name!r}",
        place="on the host of the run's reward service",
    )
    return RemoteScorerOptions(
        name=service.name,
        address=service.address,
        shape=Shape.configured(service),
        timeout_s=service.timeout_s or config.timeout_s,
        retry_for_s=service.retry_for_s,
        max_items_per_call=service.max_items_per_call,
        concurrency=service.concurrency,
        max_message_bytes=settings.max_message_bytes,
        credentials=_over_tls(service, credentials),
        tls_name=service.tls_name or "",
    )


def _over_tls(service: RewardServiceConfig, credentials: Credentials) -> Credentials:
    """Returns the credentials with the service's files for TLS."""
    if service.tls is False:
        return replace(credentials, tls=None)
    if service.tls_dir is not None:
        files = TlsFiles(Path(service.tls_dir))
        try:
            files.read()
        except EnvironmentLackError as error:
            raise ConfigError(
                f"tls_dir={service.tls_dir} of the reward service {service.name!r} cannot be used; it must "
                f"be on the host of the run's reward service ({error})"
            ) from error
        return replace(credentials, tls=files)
    if credentials.tls is None and (service.tls or service.tls_name is not None):
        raise ConfigError(
            f"the reward service {service.name!r} is called over TLS, but there are no files for it: "
            f"name a folder with its authority's ca.pem as tls_dir, or set {TLS_DIR} for the run's reward "
            "service"
        )
    return credentials
