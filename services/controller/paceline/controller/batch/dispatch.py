"""DISPATCH: sends prompt groups out, each once.

    order -> prompts that are not in the stream yet -> prompts:vN mailbox

A step that is executed again after a restart of the controller sends only the missing prompts. A repeated
prompt would do no harm, because its samples have the same seeds, and the barrier drops repeats. That is how
samples that a blob store has lost come again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.broker import names
from paceline.broker.backpressure import append_when_room
from paceline.broker.base import Broker, Outgoing
from paceline.broker.log import read_all
from paceline.controller.batch.images import PromptImages
from paceline.controller.progress import Run
from paceline.core.errors import InvalidMessageError
from paceline.core.ids import sample_seed
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import PromptGroup, SamplingSpec, ScoredHeader
from paceline.data.images import ImageReader
from paceline.data.prompts import Prompt
from paceline.service.observability.telemetry import current_traceparent
from paceline.wire import decode_prompt_group, encode_prompt_group

_Key = tuple[int, int, str, int]
"""Step, version of the policy, purpose and prompt id of a prompt group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """The samples that an order wants of each prompt for one purpose.

    Attributes:
        val_set: the set of data.val_sets that the prompts belong to; "" for other prompts.
    """

    purpose: str
    num_samples: int
    sampling: SamplingSpec
    val_set: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The prompts of one collection, and the samples that each of them gets; no purpose occurs twice.

    Attributes:
        prompt_asks: the samples of single prompts, which replace `asks`.
    """

    step: int
    policy: PolicyTag
    prompts: Mapping[int, Prompt]
    asks: tuple[Ask, ...]
    prompt_asks: Mapping[int, tuple[Ask, ...]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Samples per prompt, by purpose."""
        return _counts(self.asks)

    @property
    def prompt_counts(self) -> dict[int, dict[str, int]]:
        """Samples by purpose of each prompt in `prompt_asks`."""
        return {prompt_id: _counts(asks) for prompt_id, asks in self.prompt_asks.items()}


def _key(group: PromptGroup) -> _Key:
    return group.step, group.policy.version, group.purpose, group.prompt_id


def _counts(asks: Iterable[Ask]) -> dict[str, int]:
    return {str(ask.purpose): ask.num_samples for ask in asks}


class Dispatcher:
    """Sends prompts out, after storing their images.

    Args:
        images: makes the images' pixels; None if prompts have none.
        beside: whether validation servers answer the prompts, beside training.
    """

    def __init__(
        self, run: Run, broker: Broker, images: ImageReader | None = None, *, beside: bool = False
    ) -> None:
        self._config, self._run_id, self._journal = run.config, run.id, run.journal
        self._broker, self._beside = broker, beside
        self._sent = Counter[_Key]()
        self._lost: dict[_Key, set[str]] = {}
        self._images = PromptImages(broker, run.id, images)

    async def recall(self, version: int) -> None:
        """Learns from the stream of a version which prompts an earlier controller sent."""
        self.forget()
        async for group in self._groups_of(version):
            self._sent[_key(group)] += 1
            self._images.note(group.images, group.step)
        if self._images.expected:
            # The finished step's images are still there if it was not cleaned up.
            async for group in self._groups_of(version - 1):
                self._images.note(group.images, group.step)

    def stream(self, version: int) -> str:
        """Names the mailbox of the prompts that are to be sampled from a version."""
        if self._beside:
            return names.val_prompts(self._run_id, version)
        return self._training_stream(version)

    def streams(self, version: int) -> list[str]:
        """Names all mailboxes that may have prompts for a version."""
        return [self.stream(version), *([self._training_stream(version)] if self._beside else [])]

    def _training_stream(self, version: int) -> str:
        return names.prompts(self._run_id, None if self._config.pushes_in_flight else version)

    async def _groups_of(self, version: int) -> AsyncIterator[PromptGroup]:
        async for entry in read_all(self._broker, self.stream(version)):
            with contextlib.suppress(InvalidMessageError):
                yield decode_prompt_group(entry.payload)

    def forget(self) -> None:
        """Forgets the sent prompts, because the broker has lost them; everything is sent again."""
        self._sent.clear()
        self._lost.clear()
        self._images.forget()

    async def clean_up(self, step: int) -> None:
        """Forgets the prompts of the steps before `step`, and removes their images."""
        self._sent = Counter({key: times for key, times in self._sent.items() if key[0] >= step})
        self._lost = {key: draws for key, draws in self._lost.items() if key[0] >= step}
        await self._images.drop(before=step)

    async def dispatch(self, order: Order) -> list[int]:
        """Appends one message per prompt and purpose, in the order of `order.prompts` and of its asks.

        Returns:
            The prompts that were sent: those whose messages were not all in the stream yet.
        """
        return await self._send(order, [g for g in self._groups(order) if _key(g) not in self._sent])

    async def send_again(self, order: Order, lost: Iterable[ScoredHeader]) -> list[int]:
        """Sends the groups of lost samples once more for each draw that has lost some.

        Returns:
            The prompts that were sent.
        """
        prompts: dict[int, Prompt] = {}
        for header in lost:
            sample = header.trajectory_id
            key = sample.step, order.policy.version, sample.purpose, sample.prompt_id
            self._lost.setdefault(key, set()).add(header.blob_key.replace(str(sample), ""))
            prompts[sample.prompt_id] = order.prompts[sample.prompt_id]
        groups = self._groups(replace(order, prompts=prompts))
        return await self._send(
            order, [g for g in groups if len(self._lost.get(_key(g), ())) >= self._sent[_key(g)]]
        )

    async def _send(self, order: Order, groups: list[PromptGroup]) -> list[int]:
        if self._images.expected:
            groups = [
                replace(g, images=await self._images.store(order.prompts[g.prompt_id].images, g.step))
                for g in groups
            ]
        if groups:
            await self._append(self.stream(order.policy.version), groups)
        self._sent.update(_key(group) for group in groups)
        return list(dict.fromkeys(group.prompt_id for group in groups))

    async def lend(self, order: Order) -> None:
        """Makes the servers that answer training prompts answer an order for validation servers, too."""
        await self._append(self._training_stream(order.policy.version), self._groups(order))

    def _groups(self, order: Order) -> list[PromptGroup]:
        return [
            self._group(order, ask, prompt)
            for prompt_id, prompt in order.prompts.items()
            for ask in order.prompt_asks.get(prompt_id, order.asks)
        ]

    async def _append(self, stream: str, groups: Sequence[PromptGroup]) -> None:
        await self._broker.ensure_group(stream, names.ROLLOUT_GROUP)
        traceparent = current_traceparent()
        await append_when_room(
            self._broker,
            [
                Outgoing(stream=stream, payload=encode_prompt_group(group), traceparent=traceparent)
                for group in groups
            ],
            max_length=self._config.broker.max_stream_length,
            timeout_s=self._config.stall_timeout_s,
        )

    def _group(self, order: Order, ask: Ask, prompt: Prompt) -> PromptGroup:
        seeds = tuple(
            sample_seed(
                run_seed=self._config.trainer.seed,
                step=order.step,
                prompt_id=prompt.prompt_id,
                sample_index=index,
                purpose=ask.purpose,
            )
            for index in range(ask.num_samples)
        )
        return PromptGroup(
            run_id=self._run_id,
            step=order.step,
            purpose=ask.purpose,
            prompt_id=prompt.prompt_id,
            prompt_token_ids=prompt.token_ids,
            sampling=ask.sampling,
            seeds=seeds,
            policy=order.policy,
            context=replace(prompt.context, val_set=ask.val_set),
            messages=prompt.messages if self._config.has_episodes else (),
        )
