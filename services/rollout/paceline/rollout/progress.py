"""Saves the tokens of half-drawn prompt groups beside their entry, so that another server can continue them.

    prompts -> saved before? -> engine, from the saved tokens on -> samples
                                  `-- every few seconds, and when this server leaves: saved beside the entry

A draw depends only on the weights, its seed and its position, so with the same weights a continued sample
equals an uninterrupted one. Saved tokens are deleted with the entry, and never trained by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from paceline.broker.base import Entry, SavedPart
from paceline.broker.mailbox import Mailbox
from paceline.core.errors import InvalidMessageError, PacelineError
from paceline.core.policy import PolicyRange, PolicyTag
from paceline.core.samples.trajectory import FinishReason, PartialSample, PromptGroup, SamplingSpec
from paceline.rollout.engines.base import Engine, Sample, SampleRequest
from paceline.service.observability import metrics, telemetry
from paceline.wire import LIMITS, decode_progress, encode_progress

log = logging.getLogger(__name__)

Policies = Callable[[], dict[int, PolicyTag]]
"""Policies that may have sampled a token, by version. Empty: only the policy of a group's dispatch."""

_LAST_SAVE_S: Final = 3.0


class HandedOverError(Exception):
    """The group goes to another server, with its saved tokens."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Attempt:
    """A group in the engine.

    `begun` has the samples' tokens from before this attempt, by index; `ends` is the number of each sample's
    saved tokens, `num_bytes` their size. `is_lost`: another server has the entry, so nothing more is saved.
    """

    box: Mailbox
    entry: Entry
    group: PromptGroup
    requests: Sequence[SampleRequest]
    begun: Mapping[int, PartialSample]
    ends: dict[int, int]
    num_bytes: int
    began_s: float = field(default_factory=time.monotonic)
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    is_handed_over: bool = False
    is_lost: bool = False

    def wanted(self) -> dict[str, int]:
        """Returns by request how many tokens of this attempt are saved already."""
        return {
            request.request_id: self.ends.get(index, 0) - len(request.drawn)
            for index, request in enumerate(self.requests)
            if not (index in self.begun and _finish_of(self.begun[index], self.group.sampling))
        }

    def parts(self, drawn: Mapping[str, Sample], policies: Mapping[int, PolicyTag]) -> list[PartialSample]:
        """Returns the tokens to save now, without samples whose version is too old."""
        parts = []
        for index, request in enumerate(self.requests):
            sample, first = drawn.get(request.request_id), self.ends.get(index, 0)
            if sample is None or not np.isfinite(sample.log_probs).all():
                continue
            ranges = _ranges(sample, first, self.group.policy, policies)
            if ranges:
                parts.append(
                    PartialSample(
                        sample_index=index,
                        seed=request.seed,
                        first=first,
                        token_ids=sample.token_ids,
                        log_probs=sample.log_probs,
                        ranges=ranges,
                    )
                )
        return parts

    def samples(self, drawn: Iterable[Sample]) -> list[Sample]:
        """Returns complete samples: the tokens from before, joined with those that the engine drew."""
        rest, wholes = iter(drawn), []
        for index in range(self.group.num_samples):
            begun = self.begun.get(index)
            reason = _finish_of(begun, self.group.sampling) if begun else None
            wholes.append(_whole(begun, reason) if begun and reason else _joined(begun, next(rest)))
        return wholes


class ResumableDraws:
    """Draws groups with an engine that can continue given tokens, and saves the tokens of unfinished groups.

    Args:
        policies: the policies of an engine whose weights change during an answer.
        every_s: seconds between two saves, and the least age of a group that is saved; 0: groups are saved
            only when this server leaves.
    """

    def __init__(self, engine: Engine, policies: Policies, *, every_s: float) -> None:
        self._engine, self._policies, self._every_s = engine, policies, every_s
        self._attempts: dict[str, _Attempt] = {}
        self._saving = asyncio.Lock()
        self._is_leaving = False
        for metric in (metrics.TOKENS_CARRIED_OVER, metrics.PROGRESS_SAVED):
            telemetry.count(metric, 0)  # makes the metrics' first increase visible

    async def draw(
        self,
        box: Mailbox,
        entry: Entry,
        group: PromptGroup,
        requests: Sequence[SampleRequest],
        ended: Callable[[], None],
        *,
        policy: PolicyTag,
    ) -> list[Sample]:
        """Draws as `Engine.generate` does, but continues from the tokens that an earlier attempt has saved.

        Args:
            requests: one per sample of the group.

        Raises:
            HandedOverError: this server leaves; the group's tokens are saved.
        """
        begun, num_bytes = await self._begun(box, entry, group, policy) if entry.deliveries > 1 else ({}, 0)
        if self._is_leaving:
            raise HandedOverError
        attempt = _Attempt(
            box=box,
            entry=entry,
            group=group,
            requests=[
                replace(request, drawn=begun[index].token_ids.tolist()) if index in begun else request
                for index, request in enumerate(requests)
            ],
            begun=begun,
            ends={index: part.end for index, part in begun.items()},
            num_bytes=num_bytes,
        )
        asked = attempt.wanted()
        for _ in range(group.num_samples - len(asked)):
            ended()
        unfinished = [request for request in attempt.requests if request.request_id in asked]
        self._attempts[entry.entry_id] = attempt
        try:
            return attempt.samples(await self._engine.generate(unfinished, ended) if unfinished else [])
        except asyncio.CancelledError:
            if attempt.is_handed_over and attempt.task is not None and not attempt.task.uncancel():
                raise HandedOverError from None
            raise
        finally:
            del self._attempts[entry.entry_id]

    async def _begun(
        self, box: Mailbox, entry: Entry, group: PromptGroup, policy: PolicyTag
    ) -> tuple[dict[int, PartialSample], int]:
        """Returns the group's saved tokens and their size in bytes; nothing if they cannot be used."""
        saved = await box.progress(entry)
        if not saved:
            return {}, 0
        try:
            begun = decode_progress(saved, vocab_size=self._engine.vocab_size)
            known = {group.policy.version: group.policy, policy.version: policy} | self._policies()
            fault = next(filter(None, (_fault(part, group, policy, known) for part in begun.values())), "")
        except InvalidMessageError as error:
            fault = str(error)
        if fault:
            log.warning("prompt %d is drawn from its first token on: %s", group.prompt_id, fault)
            return {}, 0
        for tag in (ranged.policy for part in begun.values() for ranged in part.ranges):
            self._policies().setdefault(tag.version, tag)
        num_tokens = sum(part.end for part in begun.values())
        telemetry.count(metrics.TOKENS_CARRIED_OVER, num_tokens)
        log.info("prompt %d goes on from %d tokens of an earlier attempt", group.prompt_id, num_tokens)
        return begun, len(saved)

    async def save_regularly(self, going: asyncio.Event) -> None:
        """Saves, every `every_s` seconds, the tokens of groups that have been under way at least that long.

        Args:
            going: not set while the engine is paused.
        """
        while self._every_s:
            await asyncio.sleep(self._every_s)
            await going.wait()
            await self._save(least_age_s=self._every_s)

    async def save(self) -> None:
        """Saves the tokens of all groups; gives up after 3 s, since the rest is drawn again."""
        try:
            async with asyncio.timeout(_LAST_SAVE_S):
                await self._save(least_age_s=0.0)
        except TimeoutError:
            log.warning("tokens of unfinished samples were not saved within %g s", _LAST_SAVE_S)

    async def hand_over(self) -> None:
        """Saves the tokens of all groups and ends their attempts, for good."""
        self._is_leaving = True
        await self.save()
        for attempt in self._attempts.values():
            if attempt.task is not None:
                attempt.is_handed_over = attempt.task.cancel()

    async def _save(self, *, least_age_s: float) -> None:
        oldest = time.monotonic() - least_age_s
        async with self._saving:
            known = self._attempts.values()
            attempts = [attempt for attempt in known if attempt.began_s <= oldest and not attempt.is_lost]
            wanted = {name: first for attempt in attempts for name, first in attempt.wanted().items()}
            if not wanted:
                return
            try:
                drawn = await self._engine.drawn(wanted)
                for box in {id(attempt.box): attempt.box for attempt in attempts}.values():
                    await self._save_in(box, [a for a in attempts if a.box is box], drawn)
            except PacelineError as error:
                log.warning("tokens of unfinished samples were not saved: %s", error)

    async def _save_in(self, box: Mailbox, attempts: Iterable[_Attempt], drawn: Mapping[str, Sample]) -> None:
        frames: dict[str, tuple[_Attempt, list[PartialSample], bytes]] = {}
        for attempt in attempts:
            parts = attempt.parts(drawn, self._policies())
            frame = encode_progress(parts) if parts else b""
            # The next server would refuse saved tokens of more bytes.
            if parts and attempt.num_bytes + len(frame) <= LIMITS.max_bytes:
                frames[attempt.entry.entry_id] = attempt, parts, frame
        saved = await box.save_progress(
            [
                SavedPart(entry_id=entry_id, offset=attempt.num_bytes, data=frame)
                for entry_id, (attempt, _, frame) in frames.items()
            ]
        )
        for entry_id, (attempt, parts, frame) in frames.items():
            attempt.is_lost = entry_id not in saved
            if attempt.is_lost:
                continue
            attempt.num_bytes += len(frame)
            attempt.ends |= {part.sample_index: part.end for part in parts}
            telemetry.count(metrics.PROGRESS_SAVED, len(frame))


def _finish_of(begun: PartialSample, sampling: SamplingSpec) -> FinishReason | None:
    """Returns why a response ends with these tokens; None if it goes on."""
    if int(begun.token_ids[-1]) in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if begun.end >= sampling.max_tokens else None


def _fault(part: PartialSample, group: PromptGroup, policy: PolicyTag, known: Mapping[int, PolicyTag]) -> str:
    """Says why saved tokens cannot begin a sample of the group here; "" if they can."""
    if part.sample_index >= group.num_samples or part.seed != group.seeds[part.sample_index]:
        return f"the saved tokens are not those of sample {part.sample_index}"
    if (
        part.end > group.sampling.max_tokens
        or np.isin(part.token_ids[:-1], group.sampling.stop_token_ids).any()
    ):
        return f"the saved tokens of sample {part.sample_index} go on after its end"
    for version, tag in ((r.policy.version, r.policy) for r in part.ranges):
        if not group.policy.version <= version <= policy.version:
            return f"it needs {group.policy} or newer; this server holds {policy}, but {tag} drew a part"
        if known.get(version, tag) != tag:
            return f"{tag} drew a part, but version {version} is {known[version]}"
    return ""


def _ranges(
    sample: Sample, first: int, policy: PolicyTag, policies: Mapping[int, PolicyTag]
) -> tuple[PolicyRange, ...]:
    """Returns which policies drew the tokens after the first `first`; () if one of them is not known."""
    end = first + len(sample.token_ids)
    if not policies:
        return (PolicyRange(policy, first, end),)
    if any(version not in policies for _, version in sample.versions):
        return ()
    ends = [first + begin for begin, _ in sample.versions[1:]] + [end]
    return tuple(
        PolicyRange(policies[version], first + begin, last)
        for (begin, version), last in zip(sample.versions, ends, strict=True)
    )


def _whole(begun: PartialSample, reason: FinishReason) -> Sample:
    return Sample(
        token_ids=begun.token_ids,
        log_probs=begun.log_probs,
        finish_reason=reason,
        versions=tuple((part.first, part.policy.version) for part in begun.ranges),
    )


def _joined(begun: PartialSample | None, rest: Sample) -> Sample:
    """Joins the parts of a sample; earlier tokens keep the log-probs recorded when they were drawn."""
    if begun is None:
        return rest
    versions = [(part.first, part.policy.version) for part in begun.ranges]
    for first, version in rest.versions:
        if version != versions[-1][1]:
            versions.append((begun.end + first, version))
    return Sample(
        token_ids=np.concatenate([begun.token_ids, rest.token_ids]),
        log_probs=np.concatenate([begun.log_probs, rest.log_probs]),
        finish_reason=rest.finish_reason,
        versions=tuple(versions),
        expert_choices=rest.expert_choices,
    )
