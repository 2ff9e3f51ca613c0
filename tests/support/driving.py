"""Episodes that agents lead over the wire, from the rollout server's side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.rollout.episodes.agents.endpoint import AgentEndpoint
from paceline.rollout.episodes.environments.remote import RemoteEnvironment, RemoteEnvironmentOptions
from paceline.rollout.episodes.loop import Slot
from paceline.rollout.episodes.recorder import Draw
from paceline.sdk import EnvironmentServer, Outcome, agent
from paceline.service.identity.credentials import Credentials
from support.episodes import episodes, group, patient_abandonment

if TYPE_CHECKING:
    import openai

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def play(
    function: Callable[..., Any],
    engine: Any,
    *,
    slot: Slot | None = None,
    samples: int = 1,
    retries: int = 0,
    run_s: float = 20.0,
    **changes: Any,
) -> list[Draw]:
    """Episodes of an agent over the wire, from the rollout server's side."""
    endpoint = AgentEndpoint(host="127.0.0.1", tls=None)
    await endpoint.start()
    async with (
        EnvironmentServer(agent(function), token="secret") as server,
        asyncio.timeout(120),
        patient_abandonment(),
    ):
        remote = RemoteEnvironment(
            RemoteEnvironmentOptions(
                address=server.address,
                call_s=30.0,
                lease_s=30.0,
                credentials=Credentials(token="secret"),
                run_s=run_s,
            )
        )
        await remote.start()
        try:
            drawing = episodes(engine, remote, retries=retries, endpoint=endpoint, **changes)
            drawn = await drawing.draw(group(samples=samples), "0", lambda: slot or Slot())
            assert server.sessions.num_open == 0
            return drawn
        finally:
            await remote.close()
            await endpoint.close()
            assert server.sessions.num_open == 0


def client(base_url: str, token: str, **options: Any) -> openai.AsyncOpenAI:
    from openai import AsyncOpenAI  # takes seconds; every process of pytest collects this module

    return AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0, timeout=60.0, **options)


async def calculate(task: Any, *, base_url: str, token: str, model: str) -> Outcome:
    """A plain loop over tool calls."""
    messages: list[Any] = [*task["messages"]]
    async with client(base_url, token) as api:
        while True:
            answer = await api.chat.completions.create(model=model, messages=messages, tools=[ADD])
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return Outcome(reward=float(said.content == "It is 3"), components={"turns": len(messages)})
            for made in said.tool_calls:
                arguments = json.loads(made.function.arguments)
                messages.append(
                    {"role": "tool", "tool_call_id": made.id, "content": str(sum(arguments.values()))}
                )
