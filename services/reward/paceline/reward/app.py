"""The reward service's process: joins the fleet, starts the scorers, works the mailbox until the run is over.

starting (tokenizer, reward processes, remote services) -> serving -> the run is over, SIGTERM or drained:
what is under way is scored, as far as the time allows -> left
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc

from paceline.broker import open_broker
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.core.attached_clients.attachment import Leave
from paceline.core.members import RewardState
from paceline.core.user_functions.reward_function import check_extra_keys
from paceline.data.byte_decoder import fast_decoder
from paceline.data.prompts import Tokenizer, load_tokenizer
from paceline.reward.attached.scorer import AttachedScorer
from paceline.reward.attached.servicer import GatewayServicer
from paceline.reward.consumer import MAX_ENTRIES, Consumer, ConsumerOptions
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.servicer import RewardServicer
from paceline.reward.teacher.policy_tokens import policy_tokens
from paceline.reward.teacher.teacher import Teacher
from paceline.reward.val_rewards import RewardBySet
from paceline.rpc.v1 import reward_pb2_grpc
from paceline.service.identity.credentials import REWARD_TOKEN, Credentials
from paceline.service.member.bootstrap import MemberSession
from paceline.service.member.controller_link import MemberReport, Registration
from paceline.service.observability import metrics, telemetry
from paceline.service.threads import in_stoppable_thread, in_thread
from paceline.storage.models import local_model

_log = logging.getLogger(__name__)

_WIND_UP_S = 5.0
# After a signal, running batches get this long; slower ones go to another service.
_FINISH_S = 5.0


_Servicers = tuple[RewardServicer, GatewayServicer]


def _add_to_server(servicers: _Servicers, server: grpc.aio.Server) -> None:
    reward, gateway = servicers
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward, server)
    reward_pb2_grpc.add_RewardGatewayServicer_to_server(gateway, server)


class RewardApp:
    """The process of a reward service."""

    def __init__(self, session: MemberSession) -> None:
        self._session = session
        self._state = RewardState.STARTING
        self._consumer: Consumer | None = None

    async def run(self) -> None:
        """Serves until the run is over or a signal comes."""
        servicers = RewardServicer(), GatewayServicer()
        registration = await self._session.join(_add_to_server, servicers, self._report)
        work = self._session.spawn("work", self._work(registration, servicers))
        try:
            await self._session.until_leaving()
            await self._session.finish(lambda: self._wind_up(work), grace_s=_FINISH_S)
        finally:
            work.cancel()
            await asyncio.wait({work}, timeout=_WIND_UP_S)

    async def _wind_up(self, work: asyncio.Task[None]) -> None:
        """Takes no more trajectories; returns when those under way are scored."""
        if self._consumer is not None:
            self._state = RewardState.DRAINING
            self._session.poke()
            self._consumer.stop()
            await asyncio.wait({work})

    async def _work(self, registration: Registration, servicers: _Servicers) -> None:
        config = registration.config
        check_extra_keys(config.data.extra_keys)
        settings = scorer_settings(registration, self._session.options.member_id)
        scorer = RewardBySet.configured(replace(settings, notify=self._session.notify), config)
        self._session.context.defer("scorers", scorer.close)
        telemetry.observe(metrics.REWARD_QUEUE, scorer.queues)
        # Importing the tokenizer library or downloading takes seconds, during which heartbeats must continue.
        loading = asyncio.ensure_future(in_stoppable_thread(functools.partial(_load_tokenizer, config.model)))
        try:
            await scorer.start()
            tokenizer = await loading
        finally:
            loading.cancel()
            await asyncio.wait([loading])
        teacher = await self._teacher(config, tokenizer)
        broker = open_broker(
            registration.broker_url,
            stores=registration.blob_stores,
            outage_timeout_s=config.broker.outage_timeout_s,
        )
        self._session.context.defer("broker", broker.close)
        self._consumer = Consumer(
            broker=broker,
            scorer=scorer,
            tokenizer=await in_thread(fast_decoder, tokenizer),
            options=consumer_options(
                registration, self._session.options.member_id, self._session.link.incarnation
            ),
            teacher=teacher,
        )
        self._session.context.defer("attached clients", lambda: self._let_go(scorer.attached))
        reward, gateway = servicers
        reward.scorer, reward.has_groups = scorer, config.scores_groups
        gateway.gateways = {attached.names[0]: attached.gateway for attached in scorer.attached}
        self._state = RewardState.SERVING
        self._session.poke()
        _log.info("serving")
        await self._consumer.run()

    async def _teacher(self, config: RunConfig, tokenizer: Tokenizer) -> Teacher | None:
        """Returns the run's teacher, compared with the policy if it answers; None if there is none."""
        if config.algorithm.teacher is None:
            return None
        tokens = await in_thread(policy_tokens, tokenizer, config)
        teacher = Teacher(config.algorithm.teacher, tokens, self._session.notify)
        self._session.context.defer("teacher", teacher.close)
        await teacher.start()
        return teacher

    async def _let_go(self, attached: Sequence[AttachedScorer]) -> None:
        is_over = self._session.run_over.is_set()
        leave = Leave(reason="the run is over" if is_over else "this service ends", for_good=is_over)
        await asyncio.gather(*(scorer.gateway.close(leave) for scorer in attached))

    def _report(self) -> MemberReport:
        in_flight = self._consumer.num_in_flight if self._consumer else 0
        return MemberReport(state=self._state, in_flight=in_flight)


def consumer_options(registration: Registration, member_id: str, incarnation: str) -> ConsumerOptions:
    """Returns how a member of the run takes trajectories and writes scores."""
    config = registration.config
    return ConsumerOptions(
        run_id=registration.run_id,
        member_id=member_id,
        incarnation=incarnation,
        lease_s=config.broker.lease_s,
        # The controller reads `scored` as a log and trims it after each step. A bound would block a step with
        # more samples; the stream is bounded by what a step requests.
        max_stream_length=sys.maxsize,
        room_timeout_s=config.stall_timeout_s,
        save_texts=config.keeps_texts,
        max_deliveries=config.reward.max_deliveries,
        reports_beside=config.validates_beside,
        # As many groups as hold the samples of an ordinary batch.
        max_entries=max(1, MAX_ENTRIES // config.rollout.n) if config.scores_groups else MAX_ENTRIES,
    )


def scorer_settings(registration: Registration, member_id: str) -> ScorerSettings:
    """Returns the settings from which a member of the run builds its scorers."""
    config = registration.config
    return ScorerSettings(
        config=config.reward,
        credentials=Credentials.from_env(REWARD_TOKEN),
        max_message_bytes=config.service.max_message_mib * 2**20,
        run_id=registration.run_id,
        # Each service of a run draws different random numbers.
        seed=f"{config.trainer.seed}/{member_id}",
    )


def _load_tokenizer(model: ModelConfig, stopped: Callable[[], bool]) -> Tokenizer:
    model = local_model(model, "reward", stopped=stopped)
    return load_tokenizer(model.tokenizer_path or model.path)
