"""A dataflow that a script controls: each verb and each answer is a line of JSON over the script's socket.

    controller: {"step": 7}    script: {"verb": "draw"}    controller: {"ok": [...]}    script: {"verb": ...
    the last: {"verb": "next"}, or {"verb": "stop"} to end the run with this step

The script controls one step at a time. A restarted controller connects anew, and the script repeats its
verbs, which get the same answers.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from paceline.controller.run.dataflow.verbs import Verbs
from paceline.core.errors import ConfigError, PacelineError
from paceline.data.prompts import Prompt
from paceline.data.samples import ScoredSample
from paceline.data.scripted import SOCKET, plain_prompt, plain_samples

_MOST_BYTES = 1 << 30
# A notebook may take long between verbs; meanwhile the journal says that the run waits for it.
_PATIENCE_S = 7 * 86_400.0
_NOTE_S = 60.0


async def flow(step: Verbs) -> None:
    """Carries out a step with the script's verbs."""
    path = os.environ.get(SOCKET)
    if not path:
        raise ConfigError("trainer.dataflow is the one for scripts; use paceline.api.session, which sets it")
    step.allow(_PATIENCE_S)
    reader, writer = await asyncio.open_unix_connection(path, limit=_MOST_BYTES)
    try:
        await _Led(step, reader, writer).run()
    finally:
        writer.close()


class _Led:
    """One attempt at a step, controlled by the script."""

    def __init__(self, step: Verbs, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._step, self._reader, self._writer = step, reader, writer
        self._prompts: dict[int, Prompt] = {}
        self._samples: dict[str, ScoredSample] = {}
        self._verbs: Mapping[str, Callable[..., Awaitable[object]]] = {
            "draw": self._draw,
            "prompt": self._prompt,
            "sample": self._sample,
            "train": self._train,
            "publish": self._publish,
            "note": self._note,
        }

    async def run(self) -> None:
        """Carries verbs out until the script says `next` or `stop`."""
        await self._say({"step": self._step.number})
        while True:
            request = json.loads(await self._line())
            verb = request.pop("verb")
            if verb in ("next", "stop"):
                if verb == "stop":
                    self._step.stop("the script has left the loop")
                return
            try:
                answer = await self._verbs[verb](**request)
            except PacelineError as error:
                await self._say({"error": str(error)})
                raise
            await self._say({"ok": answer})

    async def _line(self) -> bytes:
        reading = asyncio.ensure_future(self._reader.readline())
        try:
            while not (await asyncio.wait([reading], timeout=_NOTE_S))[0]:
                self._step.note_wait()
        finally:
            reading.cancel()
        line = reading.result()
        if not line:
            raise ConfigError(
                f"the script has left in step {self._step.number}; start it again, and the run goes on"
            )
        return line

    async def _say(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()

    def _known(self, prompt: Prompt | None) -> dict[str, Any] | None:
        if prompt is None:
            return None
        self._prompts[prompt.prompt_id] = prompt
        return plain_prompt(prompt)

    async def _draw(self) -> list[dict[str, Any] | None]:
        return [self._known(prompt) for prompt in self._step.draw()]

    async def _prompt(self, value: object, of: int, ground_truth: str | None) -> dict[str, Any] | None:
        return self._known(self._step.prompt(value, of=self._prompts[of], ground_truth=ground_truth))

    async def _sample(self, prompts: list[int], asks: list[list[Any]], texts: bool) -> dict[str, Any]:
        wanted = [self._step.ask(purpose, n, temperature=temperature) for purpose, n, temperature in asks]
        samples = await self._step.sample([self._prompts[i] for i in prompts], *wanted, texts=texts)
        for sample in (*samples, *(s for others in samples.beside.values() for s in others)):
            self._samples[str(sample.header.trajectory_id)] = sample
        return plain_samples(samples)

    async def _train(self, samples: list[list[Any]]) -> dict[str, float]:
        return dict(await self._step.train(self._chosen(*chosen) for chosen in samples))

    def _chosen(
        self, name: str, reward: float | None, baseline: float | None, num_tokens: int
    ) -> ScoredSample:
        sample = self._samples.get(name)
        if sample is None:
            raise ConfigError(f"the script trains {name}, which is no sample of this step")
        sample = sample if reward is None else sample.with_reward(reward)
        return replace(sample.with_baseline(baseline), num_baseline_tokens=num_tokens)

    async def _publish(self) -> None:
        await self._step.publish()

    async def _note(self, name: str, value: float) -> None:
        self._step.note(name, value)
