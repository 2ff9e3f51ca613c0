"""Wraps resources servers of NeMo-Gym as environments; they answer tool calls and grade conversations.

The episode runs here, as in NeMo-Gym's own `simple_agent`: /seed_session, then /NAME for each tool call, then
/verify with the whole conversation. The library is not needed in this process.
"""

from __future__ import annotations

import asyncio
import http.cookiejar
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.samples.chat import Message, ToolSpec
from paceline.core.text import one_line
from paceline.sdk.environment import Environment, Observation, Outcome, environment_maker


def nemo_gym_environment(url: str, *, timeout_s: float = 60.0) -> Callable[[], Environment]:
    """Turns a running resources server of NeMo-Gym into an argument of `serve_environment`.

    The run trains on the rows of `nemo_gym_rows`, with `data.extra_keys: [request]`. /verify gives
    the reward and, as `reward_components`, the components. If it excludes the sample (`mask_sample`), the
    attempt fails.

    Args:
        url: URL of the server, such as "http://127.0.0.1:8000".
        timeout_s: deadline of each request.
    """

    return environment_maker("nemo_gym", lambda: _Resources(url.rstrip("/"), timeout_s))


def nemo_gym_rows(file: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a data file of NeMo-Gym in the form of `data.train_files`.

    Args:
        file: JSON lines with `responses_create_params`.

    Raises:
        ConfigError: a row's input is not only text messages.
    """
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        said = row["responses_create_params"]["input"]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        yield {
            "prompt": [_message(message, file) for message in messages],
            "ground_truth": "",
            "data_source": str((row.get("agent_ref") or {}).get("name", "")),
            "request": json.dumps(row),
        }


def _message(message: Mapping[str, Any], file: str | Path) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(
            f"{file}: an input is {one_line(json.dumps(message))[:80]}, and prompts are messages of text: "
            "leave such rows out"
        )
    return {"role": "system" if role == "developer" else role, "content": content}


class _Resources(Environment):
    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        # The server identifies the episode by a cookie.
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener = urllib.request.build_opener(cookies)
        self._request: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        if "request" not in task:
            raise ValueError(
                "the row has no column request: the run's configuration needs data.extra_keys: [request]"
            )
        self._request = json.loads(task["request"])
        offered = self._request["responses_create_params"].get("tools") or ()
        self.tools = {  # type: ignore[misc]  # of this instance only
            tool["name"]: (_spec(tool), self._timeout_s) for tool in offered if tool["type"] == "function"
        }
        await self._post("seed_session", self._request)
        return Observation()

    async def step(self, action: Message) -> Observation:
        for call in action.tool_calls:
            arguments = json.dumps(dict(call.arguments))
            made = {"type": "function_call", "name": call.name, "arguments": arguments}
            self._output.append({**made, "call_id": call.call_id, "id": call.call_id, "status": "completed"})
        if not action.tool_calls:
            text = {"type": "output_text", "text": action.content, "annotations": []}
            said = {"type": "message", "role": "assistant", "content": [text]}
            self._output.append({**said, "id": f"msg_{len(self._output)}", "status": "completed"})
        answered = await self.call_tools(action)
        self._output += [
            {"type": "function_call_output", "call_id": message.call_id, "output": message.content}
            for message in answered.messages
        ]
        return answered

    async def invoke(self, name: str, arguments: Mapping[str, object]) -> str:
        """Posts to the server's route of this name; returns its answer, or its error as text."""
        try:
            return await self._post(name, arguments)
        except urllib.error.HTTPError as error:
            return error.read().decode(errors="replace")

    async def close(self, stop_reason: str) -> Outcome:
        asked = self._request["responses_create_params"]
        response = {
            "id": "resp_0",
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": asked.get("tools") or [],
        }
        try:
            graded = json.loads(await self._post("verify", {**self._request, "response": response}))
        except urllib.error.HTTPError as error:
            raise RuntimeError(one_line(f"/verify: {error}: {error.read()[:400]!r}")) from error
        if graded.get("mask_sample"):
            raise RuntimeError(one_line(f"the sample does not count: {graded.get('failure_reason')}"))
        return Outcome(reward=float(graded["reward"]), components=graded.get("reward_components") or {})

    async def _post(self, route: str, body: Mapping[str, Any]) -> str:
        return await asyncio.to_thread(self._posted, route, json.dumps(dict(body)).encode())

    def _posted(self, route: str, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{route}", body, headers)  # noqa: S310  the user's
        with self._opener.open(request, timeout=self._timeout_s) as answer:
            text: str = answer.read().decode(errors="replace")
            return text


def _spec(tool: Mapping[str, Any]) -> ToolSpec:
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    return ToolSpec(name=tool["name"], description=tool.get("description") or "", parameters=parameters)
