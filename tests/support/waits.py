"""Waits without a deadline of their own, each with the reason why it needs none. Written down, not guessed:
`tests/architecture/test_deadlines.py` finds every wait and compares.
"""

from __future__ import annotations

_CANCELLED = "the task has just been cancelled, and nothing in it swallows that"
_VERBS = "a verb lasts as long as its phase, which has deadlines in the controller; its end ends this, too"
_OTHERS_END_IT = "what it waits for has deadlines of its own, one of which ends it"
_TOLD = "waits to be told to stop: a signal, the end of the run, or an error of another task ends it"
_FINISHING = "what is under way has deadlines of its own; after a signal MemberSession.finish bounds it"
_USERS = "a person started it at a terminal, sees what it does, and may interrupt it"
_LIFETIME = "waits for the end of a process of the run, for as long as the run lasts; stopping has a budget"

NEEDLESS: dict[str, str] = {
    # A person waits.
    "paceline.cli.commands.results.export:export_step: subprocess.run": _USERS,
    "paceline.cli.commands.results.verify:run: subprocess.run": _USERS,
    "paceline.cli.commands.start.chaos:_verify: subprocess.run": _USERS,
    "paceline.runs.controller_client:ControllerClient.watch: channels.stream": (
        "follows a run for as long as it lasts; the channel's keep-alive ends it 15 s after the peer froze"
    ),
    # For as long as the run lasts.
    "paceline.launch.launcher:_Launcher._until_the_end: asyncio.wait": _LIFETIME,
    "paceline.launch.launcher:_Launcher.run: asyncio.wait": _LIFETIME,
    "paceline.launch.launcher:_Launcher._tend: asyncio.Event().wait": "the run's end cancels it",
    "paceline.chaos.conduct:conduct: asyncio.wait": _LIFETIME,
    "paceline.chaos.conduct:Conductor._inject_all: self._room.acquire": "a recovery has a deadline",
    "paceline.show.live.wrapping_views:WatchedView.next_step: self._finished.wait": "bounded by its caller",
    "paceline.chaos.conduct:conduct: await running": _LIFETIME,
    "paceline.chaos.proxy:Proxy._serve: asyncio.wait": "a connection lasts as long as its two ends want",
    "paceline.chaos.proxy:Proxy._pass: self._open.wait": "the fault that swallows has an end",
    "paceline.launch.processes.process_tree:ProcessTree.next_exit: self._ended.get": _LIFETIME,
    "paceline.launch.services:Services.tend: asyncio.wait": _LIFETIME,
    "paceline.launch.processes.spawn:_exit_of_program: process.wait": _LIFETIME,
    "paceline.launch.remote:main: process.wait": _LIFETIME,
    "paceline.launch.container:_run: asyncio.wait": _LIFETIME,
    "paceline.launch.container:_run: process.wait": _LIFETIME,
    "paceline.launch.processes.spawn:wait_for_exit: await ended": _LIFETIME,
    "paceline.launch.launcher:_Launcher._start_and_follow: await check": (
        "a check loads the model and the data once; its process is part of the run, and a signal ends both"
    ),
    "paceline.launch.processes.ranks:_run: await echo": "the process whose log it follows has ended",
    "paceline.controller.app:_run_to_the_end: asyncio.wait": _LIFETIME,
    "paceline.controller.app:_run_to_the_end: context.stopping.wait": _TOLD,
    "paceline.controller.run.publication:Publication.to_newcomers: asyncio.wait": (
        "barrier.collect_timeout_s bounds a collection; in the end it has just been cancelled"
    ),
    "paceline.controller.run.work_ahead:WorkAheadDriver.during: asyncio.wait": _CANCELLED,
    "paceline.controller.run.work_ahead:WorkAheadDriver.during: await task": (
        "the call under way has learner.command_timeout_s, and no other follows it"
    ),
    "paceline.controller.run.lookahead:Lookahead.settle: await task": (
        "barrier.collect_timeout_s bounds each of the collections that it consists of"
    ),
    "paceline.controller.run.work_ahead:_Shift.run: self._changed.wait": (
        "barrier.collect_timeout_s bounds the collection that it works beside"
    ),
    "paceline.controller.run.publication:Publication.to_newcomers: await collecting": (
        "barrier.collect_timeout_s bounds a collection"
    ),
    "paceline.service.threads:_finished: asyncio.wait": (
        "files, or an object store, whose client has timeouts; what may take long is told to stop"
    ),
    "paceline.reward.scoring.scores:answered: await answer": "whoever answers has a deadline of its own",
    "paceline.reward.app:RewardApp._work: asyncio.wait": _CANCELLED,
    "paceline.reward.app:RewardApp._work: await loading": "a copy of a model; the launcher bounds a start",
    "paceline.controller.events:EventHub.follow: queue.get": (
        "a client that follows the run; the end of the run is an event, a lost client cancels the call"
    ),
    "paceline.reward.app:RewardApp._wind_up: asyncio.wait": _FINISHING,
    "paceline.rollout.sampler:Sampler.drain: asyncio.wait": _FINISHING,
    "paceline.learner.servicer:LearnerServicer.restart_wanted: self._restart.wait": _TOLD,
    "paceline.service.member.bootstrap:MemberSession.finish: self.run_over.wait": _TOLD,
    "paceline.service.member.bootstrap:MemberSession.until_leaving: self._draining.wait": _TOLD,
    "paceline.service.member.bootstrap:MemberSession._register: asyncio.wait": _CANCELLED,
    **{
        f"paceline.rollout.episodes.environments.remote:RemoteSession.{name}: self._call": (
            "each call has its deadline"
        )
        for name in ("open", "step", "close")
    },
    "paceline.sdk.served.environment_server:EnvironmentServer.stop: asyncio.wait": _CANCELLED,
    "paceline.sdk.served.serving:serve_until_signal.serve: context.stopping.wait": _TOLD,
    "paceline.sdk.attached.attachment:attach_until_signal.serve: await running": _TOLD,
    "paceline.sdk.attached.attach_reward:_Batches.score: await done": _OTHERS_END_IT,
    "paceline.sdk.adapters.gym:_Gym._called: await result": "the episode has a lease",
    "paceline.sdk.adapters.verifiers_v1:_Shared._hold: asyncio.Event().wait": (
        "holds what episodes share until the event loop ends, which cancels it"
    ),
    "paceline.sdk.adapters.mcp:_Mcp._connect: self._done.wait": "ends with its episode, which has a lease",
    "paceline.sdk.attached.attachment:Attachment._attach.open_stream: self._stub(channel).Attach": (
        "lasts as long as the run, at most ten minutes a stream; the keep-alive ends it 15 s after a loss"
    ),
    "paceline.service.attach.attaching:_Stream._messages: self._changed.wait": "ends with its stream",
    "paceline.service.attach.attaching:_Stream._on_stop: self._stopping.wait": _TOLD,
    "paceline.service.attach.gateway:Gateway.ask: await answer": _OTHERS_END_IT,
    "paceline.service.confinement.inside:_init: os.wait": "whoever started the confinement kills it in time",
    "paceline.service.member.runtime:ServiceContext.stopping_or: asyncio.wait": _TOLD,
    "paceline.service.member.runtime:ServiceContext.stopping_or: self.stopping.wait": _TOLD,
    "paceline.service.member.bootstrap:MemberSession.reporting: await work": _TOLD,
    "paceline.launch.processes.process_tree:ProcessTree._wait_for: self._hurry.wait": (
        "a task beside a wait that has a deadline; it is cancelled when that wait is over"
    ),
    # Bounded elsewhere.
    "paceline.broker.mailbox:Mailbox.__aexit__: asyncio.wait": _CANCELLED,
    "paceline.service.member.bootstrap:MemberSession.join.say_goodbye: asyncio.wait": _CANCELLED,
    "paceline.rollout.app:RolloutApp._load: asyncio.wait": _CANCELLED,
    "paceline.rollout.sampler:Sampler._take_groups: self._going.wait": (
        "a push that is under way ends with a commit or a failure; whoever closes the sampler cancels this"
    ),
    "paceline.rollout.sampler:Sampler._draw_samples: self._going.wait": (
        "`_draw` waits for it with the group's deadline"
    ),
    "paceline.rollout.progress:ResumableDraws.save_regularly: going.wait": (
        "a push that is under way ends with a commit or a failure; whoever closes the sampler cancels this"
    ),
    "paceline.rollout.sampler:Sampler.close: asyncio.wait": (
        "cancelled; the engine answers the abort or dies, and each group has a deadline"
    ),
    "paceline.controller.fleet.supervisor:Supervisor.gone: await end": (
        "a task beside a call that has a deadline; it is cancelled when the call is over"
    ),
    "paceline.controller.weights.epoch:Epochs.call_each: asyncio.wait": _OTHERS_END_IT,
    "paceline.controller.run.records.checkpoints:Checkpoints.written: await writing": _OTHERS_END_IT,
    "paceline.controller.run.publication:Publication._call_off: asyncio.wait": _CANCELLED,
    "paceline.controller.run.records.trajectories:saving_trajectories: asyncio.wait": _CANCELLED,
    "paceline.controller.run.records.trajectories:saving_trajectories: await saving": (
        "reads texts, and each command to the broker has a deadline, and writes a file"
    ),
    "paceline.controller.fleet.clients:while_alive: asyncio.wait": (
        "its callers pass calls with a deadline; the end of the member ends it too"
    ),
    "paceline.reward.consumer:Consumer._work: slots.acquire": (
        "a slot is free when an item is scored, and scoring has a deadline"
    ),
    "paceline.reward.functions.pool:FunctionPool._take: self._queued.wait_for": (
        "an idle task of the pool waits for work; closing the pool cancels it"
    ),
    "paceline.reward.functions.pool:FunctionPool.score: await done": _OTHERS_END_IT,
    "paceline.rollout.episodes.tools.tool_pool:ToolPool.call: self._idle.get": (
        "each process is used for a bounded time, and the group's deadline stands over it"
    ),
    "paceline.rollout.episodes.agents.endpoint:EpisodeInbox.ask: await pending.answered": (
        "the episode answers or ends, and the group's deadline stands over it"
    ),
    "paceline.rollout.episodes.agents.endpoint:EpisodeInbox.next: self._requests.get": (
        "the agent's call has a deadline, and its end closes the inbox"
    ),
    "paceline.rollout.episodes.agents.drive:_Episode._play: asyncio.wait": _CANCELLED,
    "paceline.sdk.served.sessions:Sessions.run: await session.running": (
        "the caller's deadline cancels it; so does a higher attempt"
    ),
    "paceline.service.children.frames:receive: stream.readexactly": "the callers wait for it with a deadline",
    "paceline.reward.remote.merging:Merger.ask: await waiting.answer": (
        "its turn comes when a call ends, each of which has a deadline; close() ends the wait"
    ),
    "paceline.reward.remote.client:call_score: reward_pb2_grpc.RewardServiceStub(channel).Score": (
        "named here and called in the next line, with a deadline"
    ),
    "paceline.reward.remote.client:call_describe: reward_pb2_grpc.RewardServiceStub(channel).Describe": (
        "named here and called in the next line, with a deadline"
    ),
    "paceline.controller.batch.tasks:_ask: environment_pb2_grpc.EnvironmentServiceStub(channel).Tasks": (
        "named here and called two lines later, with a deadline"
    ),
    "paceline.rollout.episodes.admission:AdmissionControl.entered: entered.wait": "each group has a deadline",
    "paceline.rollout.capacity:Capacity.wait_for_room: self._changed.wait": (
        "room comes when a group ends, and each group has a deadline"
    ),
    "paceline.rollout.app:RolloutApp._start: self._session.link.may_start.wait": (
        "the learner's turn, which the controller bounds; without a controller the heartbeats end the process"
    ),
    "paceline.rollout.capacity:Capacity.wait_until_idle: self._changed.wait": "each group has a deadline",
    "paceline.rollout.sampler:Sampler._begin: asyncio.wait": "it draws one group, which has a deadline",
    "paceline.rollout.engines.vllm.sampling.log_probs:LogProbs.take: await ended.result": _OTHERS_END_IT,
    "paceline.rollout.engines.vllm.engine:VllmEngine.generate.result: collector.get": (
        "the sampler waits for the group with a deadline"
    ),
    "paceline.rollout.engines.sglang.engine:SglangEngine.generate: asyncio.wait": (
        "the sampler waits for the group with a deadline"
    ),
    "paceline.rollout.engines.vllm.engine:VllmEngine.receive: await receiving": _OTHERS_END_IT,
    "paceline.rollout.engines.vllm.engine:VllmEngine.shutdown: await ending": (
        "a step of the shutdown, which has a budget; the workers it talks to were killed just before"
    ),
    "paceline.api.session:LedRun.connected: reader.readline": _VERBS,
    "paceline.api.session:_Link.ask: self.reader.readline": _VERBS,
    "paceline.api.session:LedRun.link: self._changed.wait_for": _VERBS,
    # torch
    "paceline.weights.transport.rendezvous:_nccl_group: ProcessGroupNCCL": (
        "its timeout is in the options, which the line above sets"
    ),
}
