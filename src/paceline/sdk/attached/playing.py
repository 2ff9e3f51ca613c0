"""Plays an environment's episode by asking a rollout server for the policy's answers."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.core.samples.chat import Message, ToolCall
from paceline.core.samples.episode import OVER_CODE, Play, Played
from paceline.core.text import one_line
from paceline.sdk.environment import Environment, Observation, specs_for
from paceline.service.identity.credentials import CA_FILE, TlsFiles

_log = logging.getLogger(__name__)

_ANSWER_S = 600.0
_RELEASE_S = 10.0

Ask = Callable[[Play, Mapping[str, object]], Awaitable[dict[str, Any]]]
"""Posts a request for a completion; returns the answer, which may be an error."""


async def play(environment: Environment, episode: Play, ask: Ask) -> Played:
    """Plays an episode to its end and releases the environment; an exception becomes the field `error`."""
    try:
        opening = await environment.open(
            episode.task, task_seed=episode.task_seed, episode_seed=episode.episode_seed
        )
        if type(environment).run is not Environment.run:
            reason = await environment.run(
                base_url=episode.base_url, token=episode.token, model=episode.model
            )
        else:
            reason = await _lead(environment, episode, opening, ask)
        outcome = await environment.close(reason)
        reward = None if outcome.reward is None else float(outcome.reward)
        return Played(stop_reason=str(reason or ""), reward=reward, components=dict(outcome.components))
    except Exception as error:  # noqa: BLE001  user code
        return Played(error=one_line(f"{type(error).__name__}: {error}"))
    finally:
        try:
            async with asyncio.timeout(_RELEASE_S):
                await environment.release()
        except Exception as error:  # noqa: BLE001  user code; the instance is gone in any case
            _log.warning("release raised %s: %s", type(error).__name__, error)


async def _lead(environment: Environment, episode: Play, opening: Observation, ask: Ask) -> str:
    tools = [spec.to_template() for spec in specs_for(environment, opening.tools)]
    given: Any = episode.task.get("messages", ())
    messages = [*given, *_said(opening, "user")]
    while True:
        body = {"model": episode.model, "messages": messages, **({"tools": tools} if tools else {})}
        answer = await ask(episode, body)
        if "error" in answer:
            return _over(answer["error"])
        message = answer["choices"][0]["message"]
        observation = await environment.step(_action(message))
        if observation.done:
            return observation.done
        said = _said(observation, "tool")
        if not said:
            raise ValueError("`step` returned nothing: it must say something, or end the episode")
        messages = [*messages, message, *said]


def _over(error: Mapping[str, Any]) -> str:
    """Returns why the server ended the episode; raises for any other refusal."""
    if error.get("code") != OVER_CODE:
        raise RuntimeError(f"the rollout server refused: {error.get('message')}")
    return str(error["message"]).rpartition(": ")[2]


def _action(message: Mapping[str, Any]) -> Message:
    calls = [
        ToolCall(
            call_id=call["id"],
            name=call["function"]["name"],
            arguments=json.loads(call["function"]["arguments"]),
        )
        for call in message.get("tool_calls") or ()
    ]
    calls += [
        ToolCall(call_id=call["id"], name=call["name"], arguments={}, problem=call["error"])
        for call in message.get("invalid_tool_calls") or ()
    ]
    return Message(role="assistant", content=message.get("content") or "", tool_calls=tuple(calls))


def _said(observation: Observation, role: str) -> list[dict[str, object]]:
    said = observation.messages or (
        (Message(role=role, content=observation.text),) if observation.text else ()
    )
    return [{"role": m.role, "content": m.content, "name": m.name, "tool_call_id": m.call_id} for m in said]


class Asker:
    """Posts requests to the policy from threads.

    Args:
        num_threads: most requests at a time.
        tls: the authority to trust if the address is https.
    """

    def __init__(self, num_threads: int, tls: TlsFiles | None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="ask")
        self._context = _context(tls) if tls is not None else None

    async def __call__(self, episode: Play, body: Mapping[str, object]) -> dict[str, Any]:
        """Sends the request and returns the run's answer."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_ANSWER_S):
            return await loop.run_in_executor(self._threads, self._post, episode, json.dumps(body).encode())

    def close(self) -> None:
        """Shuts down the threads without waiting for requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, episode: Play, data: bytes) -> dict[str, Any]:
        url = f"{episode.base_url}/chat/completions"
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url} is not an address of a rollout server")
        headers = {"Authorization": f"Bearer {episode.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, data=data, headers=headers)  # noqa: S310  checked above
        try:
            with urllib.request.urlopen(  # noqa: S310
                request, timeout=_ANSWER_S, context=self._context
            ) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as refusal:
            answer = json.load(refusal)
        return answer


def _context(tls: TlsFiles) -> ssl.SSLContext:
    """Trusts the run's authority; does not check addresses, because certificates of the run name a role."""
    context = ssl.create_default_context(cafile=str(tls.folder / CA_FILE))
    context.check_hostname = False
    return context
