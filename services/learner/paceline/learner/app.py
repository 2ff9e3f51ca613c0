"""The learner's processes: rank 0 serves gRPC beside its training thread, the others follow its commands.

rank 0:  join the fleet -> training thread -> commands until the run is over
others:  the same work in the main thread, until rank 0 ends the group
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading

from paceline.core.errors import PacelineError, PeerLostError
from paceline.learner.distributed.command_loop import STOP, CommandQueue
from paceline.learner.distributed.ranks import RankEnvironment
from paceline.learner.group import Head, RankRegistration, follow, lead
from paceline.learner.servicer import LearnerServicer
from paceline.rpc.v1 import learner_pb2_grpc
from paceline.service.addresses import split, to_bind
from paceline.service.member.bootstrap import MemberSession
from paceline.service.member.controller_link import MemberReport, Registration
from paceline.service.member.runtime import EXIT_INTERRUPTED, stop_grace_s
from paceline.service.observability import telemetry
from paceline.service.observability.logs import setup_logging
from paceline.service.process import die_with_parent

log = logging.getLogger(__name__)

_STOP_S = 5.0


class LearnerApp:
    """Runs the learner's service in rank 0's process."""

    def __init__(self, session: MemberSession, environment: RankEnvironment) -> None:
        self._session, self._environment = session, environment
        self._queue = CommandQueue()
        self._servicer = LearnerServicer(self._queue, session.poke)

    async def run(self) -> None:
        """Serves until the run is over or a signal comes.

        Raises:
            PacelineError: the group failed, or has to start again.
        """
        options = self._session.options
        self._environment.use_interface(options.host_of_data)
        registration = await self._session.join(
            learner_pb2_grpc.add_LearnerServiceServicer_to_server, self._servicer, self._report
        )
        assignment = self._assignment(registration)
        training = self._start_training(assignment)
        sent_back = self._session.context.spawn("restart wanted", self._servicer.restart_wanted())
        await self._session.context.stopping_or(training, sent_back)
        if training.done():
            training.result()
        else:
            await self._stop(training)
        if sent_back.done():
            raise PeerLostError(f"starting again: {sent_back.result()}", peer=options.member_id)

    def _assignment(self, registration: Registration) -> RankRegistration:
        """Returns the run's facts that the ranks need, and rank 0's address for rollout servers."""
        options = self._session.options
        return RankRegistration(
            config=registration.config,
            broker_url=registration.broker_url,
            blob_stores=registration.blob_stores,
            checkpoints=registration.checkpoints,
            checkpoint_root=registration.checkpoint_root,
            checkpoint_marker=registration.checkpoint_marker,
            run_dir=str(registration.run_dir),
            host=to_bind(options.host_of_data),
            advertise=to_bind(options.data_host) or split(self._session.link.address)[0],
        )

    def _start_training(self, assignment: RankRegistration) -> asyncio.Future[None]:
        """Starts the only thread that uses torch; a daemon, so a hanging collective cannot block the exit."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)

        timeout_s = assignment.config.learner.command_timeout_s
        tell = self._session.tell_to_end
        head = Head(self._servicer.ready, self._session.notify, self._queue, settle, timeout_s, tell)

        def work() -> None:
            error: BaseException | None = None
            try:
                lead(self._environment, assignment, head)
            except BaseException as raised:  # noqa: BLE001  handed to the event loop, which raises it
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=work, name="training", daemon=True).start()
        return done

    async def _stop(self, training: asyncio.Future[None]) -> None:
        self._queue.submit(STOP, {"over": self._session.run_over.is_set()})
        await asyncio.wait({training}, timeout=_STOP_S)
        if not training.done():
            log.warning("the group did not stop within %g s; its ranks end with this process", _STOP_S)

    def _report(self) -> MemberReport:
        return MemberReport(state=self._servicer.state, policy=self._servicer.policy)


def run_follower(environment: RankEnvironment, host: str) -> int:
    """Runs a rank other than 0; returns the exit code."""
    die_with_parent()
    name = f"learner-rank{environment.rank}"
    setup_logging(name)
    try:
        telemetry.setup(
            "learner", run_dir=None, instance=name, local_rank=environment.local_rank, uses_gpus=True
        )
        environment.use_interface(host)
        is_over = follow(environment)
    except PacelineError as error:
        log.error("fatal: %s", error)
        return 1
    except Exception:
        log.exception("fatal")
        return 1
    finally:
        telemetry.shutdown()
    log.info("stopped")
    return 0 if is_over or not stop_grace_s() else EXIT_INTERRUPTED
