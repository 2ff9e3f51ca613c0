"""Lets a script train in a loop, and decide what each step samples and trains.

    async with session("run.yaml") as run:
        async for step in run:
            samples = await step.sample(await step.draw())
            await step.train(samples)
            await step.publish()

The verbs are those of docs/python.md, each awaited. The run's controller carries them out, as safely as in a
dataflow. If the controller restarts in the middle of a step, it gets the step's verbs again and gives the
same answers.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from paceline.api.process import TrainProcess
from paceline.core.errors import ConfigError, PeerLostError
from paceline.data.prompts import Prompt
from paceline.data.samples import ScoredSample, ScoredSamples
from paceline.data.scripted import FLOW, SOCKET, prompt_of, samples_of

_MOST_BYTES = 1 << 30
Ask = tuple[str, int | None, float | None]
"""Purpose, samples per prompt and temperature; None: as configured."""


@asynccontextmanager
async def session(
    config: str | Path | Mapping[str, Any], *overrides: str, say: Callable[[str], object] | None = print
) -> AsyncIterator[LedRun]:
    """Starts the services of a run whose steps the block controls, and stops them in order.

    Leaving the loop over the session after a step's publish() ends the run with this step and a checkpoint.
    An error in the block ends the run at once; the same call later continues with this step.

    Args:
        config: a file, or the same tree as a mapping.
        overrides: "dotted.key=value", as on the command line.
        say: called with notes for the user and with events of the start-up.

    Raises:
        ConfigError: the run cannot be started, or it is finished.
        PacelineError: the run ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="paceline") as folder:
        socket = str(Path(folder) / "script")
        given = (*overrides, f"trainer.dataflow={FLOW}")
        with TrainProcess(config, given, {SOCKET: socket}) as process:
            run = LedRun(process, say or (lambda text: None))
            server = await asyncio.start_unix_server(run.connected, socket, limit=_MOST_BYTES)
            try:
                yield run
            except BaseException as error:
                server.close()
                await run.leave(None)
                if isinstance(error, EndedError):
                    process.check(may_stop=True)
                raise
            await run.leave("stop")
            server.close()
        process.check(may_stop=False)


class EndedError(PeerLostError):
    """The run ended in the middle of a step; `session` raises its own error instead, if it has one."""


class LedRun:
    """A run controlled by the script; iterate over it once.

    Attributes:
        metrics: metrics of the last finished step.
    """

    def __init__(self, process: TrainProcess, say: Callable[[str], object]) -> None:
        self.run_dir, self.metrics = process.run_dir, dict[str, float | None]()
        self._process, self._say = process, say
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Condition()
        self._link: _Link | None = None
        self._step: LedStep | None = None
        self._has_ended = False
        self._listening = threading.Thread(target=self._listen, name="paceline train", daemon=True)
        self._listening.start()

    def __aiter__(self) -> LedRun:
        """Iterates over the steps that are left."""
        return self

    async def __anext__(self) -> LedStep:
        """Returns the next step, as soon as the run has begun it."""
        if self._step is not None:
            await self._step.finish("next")
            self._step = None
        link = await self.link(None)
        if link is None:
            raise StopAsyncIteration
        self._step = LedStep(self, link.step)
        return self._step

    async def link(self, step: int | None) -> _Link | None:
        """Waits for a controller that is in `step` (None: in any step); returns None if the run has ended.

        Raises:
            PeerLostError: the run has gone on, or back, to another step.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_ended or self._is_open())
            if not self._is_open():
                return None
        link = self._link
        if link is not None and step not in (None, link.step):
            raise PeerLostError(
                f"step {step} is void: the run is in step {link.step}; continue the loop, which returns that "
                "step",
                peer="controller",
            )
        return link

    async def leave(self, word: str | None) -> None:
        """Sends `word`, if any, to the published step, and waits for the run's end."""
        step, self._step = self._step, None
        if step is not None and step.is_published and word is not None:
            await step.finish(word)
        if self._link is not None:
            self._link.writer.close()
        if step is not None and not step.is_published:
            self._process.interrupt()
        await asyncio.to_thread(self._listening.join)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accepts a connection of the controller, which begins or continues a step."""
        try:
            hello = json.loads(await reader.readline())
        except (ValueError, ConnectionError):
            writer.close()
            return
        async with self._changed:
            self._link = _Link(int(hello["step"]), reader, writer)
            self._changed.notify_all()

    def _is_open(self) -> bool:
        return self._link is not None and not self._link.is_lost

    def _listen(self) -> None:
        for event in self._process.events():
            if event["event"] == "step":
                self.metrics = event["metrics"]
            elif event["event"] in ("milestone", "note"):
                self._say(event["text"])
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        async with self._changed:
            self._has_ended = True
            self._changed.notify_all()


class _Link:
    """A connection, which belongs to one attempt of the controller at one step."""

    def __init__(self, step: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.step, self.reader, self.writer, self.is_lost = step, reader, writer, False
        self.num_answered = 0

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the answer; None if the connection is lost."""
        try:
            self.writer.write(json.dumps(request).encode() + b"\n")
            await self.writer.drain()
            line = await self.reader.readline()
        except ConnectionError:
            line = b""
        if not line:
            self.is_lost = True
            self.writer.close()
            return None
        answer: dict[str, Any] = json.loads(line)
        self.num_answered += 1
        return answer


class LedStep:
    """A step; its verbs are those of a dataflow, each awaited.

    Attributes:
        number: number of the step, from 1.
        is_published: whether it can be finished.
    """

    def __init__(self, session: LedRun, number: int) -> None:
        self._session, self.number, self.is_published = session, number, False
        self._calls: list[tuple[dict[str, Any], Any]] = []
        self._prompts: dict[int, Prompt] = {}

    async def draw(self) -> list[Prompt]:
        """Draws the prompts of the step."""
        return [self._known(plain) for plain in await self._call(verb="draw")]

    async def prompt(
        self, value: object, *, of: Prompt | ScoredSample, ground_truth: str | None = None
    ) -> Prompt | None:
        """Makes a prompt of text or chat messages; None if it is longer than data.max_prompt_length."""
        origin = of.prompt if isinstance(of, ScoredSample) else of
        plain = await self._call(verb="prompt", value=value, of=origin.prompt_id, ground_truth=ground_truth)
        return None if plain is None else self._known(plain)

    async def reply(self, sample: ScoredSample, text: str) -> Prompt | None:
        """Makes the prompt that continues a sample: its prompt, the sample, then `text` by the user."""
        return await self.prompt(sample.continued(text), of=sample)

    def ask(self, purpose: str = "train", n: int | None = None, *, temperature: float | None = None) -> Ask:
        """Says how many samples each prompt gets for a purpose."""
        return purpose, n, temperature

    async def sample(
        self, prompts: Iterable[Prompt | None], *asks: Ask | str, texts: bool = True
    ) -> ScoredSamples:
        """Samples from the step's policy and has the samples scored."""
        plain = await self._call(
            verb="sample",
            prompts=[prompt.prompt_id for prompt in prompts if prompt is not None],
            asks=[(ask, None, None) if isinstance(ask, str) else ask for ask in asks],
            texts=texts,
        )
        return samples_of(plain, self._prompts)

    async def train(self, samples: Iterable[ScoredSample]) -> Mapping[str, float]:
        """Trains the policy on samples of this step; returns the learner's metrics."""
        rows = [
            (
                str(sample.header.trajectory_id),
                sample.reward if sample.is_given else None,
                sample.baseline,
                sample.num_baseline_tokens,
            )
            for sample in samples
        ]
        metrics: dict[str, float] = await self._call(verb="train", samples=rows)
        return metrics

    async def publish(self) -> None:
        """Lets the guard judge the step, and pushes the weights to the rollout servers."""
        await self._call(verb="publish")
        self.is_published = True

    async def note(self, name: str, value: float) -> None:
        """Adds `dataflow/NAME` to the step's metrics."""
        await self._call(verb="note", name=name, value=float(value))

    async def finish(self, word: str) -> None:
        """Ends the step, with `next` or with `stop`, which ends the run.

        Raises:
            ConfigError: the step is not published.
        """
        if not self.is_published:
            raise ConfigError(
                f"step {self.number} is not published; each turn of the loop ends with publish()"
            )
        link = await self._session.link(None)
        if link is not None and link.step == self.number:
            await self._replay(link)
            # The controller closes the connection.
            await link.ask({"verb": word})

    def _known(self, plain: Mapping[str, Any]) -> Prompt:
        prompt = self._prompts[plain["id"]] = prompt_of(plain)
        return prompt

    async def _call(self, **request: Any) -> Any:
        while True:
            link = await self._session.link(self.number)
            if link is None:
                raise EndedError(f"the run has ended in step {self.number}", peer="controller")
            if await self._replay(link) and (answer := await link.ask(request)) is not None:
                if "error" in answer:
                    raise ConfigError(answer["error"])
                self._calls.append((request, answer["ok"]))
                return answer["ok"]

    async def _replay(self, link: _Link) -> bool:
        """Repeats the step's verbs with a new controller; returns whether it is still connected."""
        while link.num_answered < len(self._calls):
            request, before = self._calls[link.num_answered]
            answer = await link.ask(request)
            if answer is None:
                return False
            if "error" in answer:
                raise ConfigError(answer["error"])
            # The learner's metrics contain seconds.
            if request["verb"] != "train" and answer["ok"] != before:
                raise PeerLostError(
                    f"step {self.number} was interrupted, and its {request['verb']}() now gives another "
                    "result, because samples were drawn again: restart the script, which repeats this step",
                    peer="controller",
                )
        return True
