"""An agent that knows nothing about training: it calls an OpenAI-compatible endpoint and a tool.

python examples/agent/agent.py &
paceline train examples/agent/grpo.yaml
"""

from __future__ import annotations

import ast
import json
import os
from typing import Any

from openai import AsyncOpenAI

from paceline.sdk import agent, serve_environment

MAX_QUESTIONS = 3


def add(expression: str) -> str:
    """Returns the sum of whole numbers, as in 17+35."""
    return str(sum(int(ast.literal_eval(number)) for number in expression.split("+")))


async def solve(task: dict[str, Any], *, base_url: str, token: str, model: str) -> float:
    """Plays one episode; returns 1 for the right sum, else 0."""
    messages: list[Any] = list(task["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=token) as client:
        for _ in range(MAX_QUESTIONS):
            said = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return float((said.content or "").strip() == task["ground_truth"])
            for call in said.tool_calls:
                try:
                    result = add(**json.loads(call.function.arguments))
                except (ValueError, SyntaxError, TypeError) as error:
                    result = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


if __name__ == "__main__":
    serve_environment(agent(solve), port=int(os.environ.get("PORT", "50072")), max_episodes=1024)
