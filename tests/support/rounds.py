"""An environment of 1 to 8 turns in a process of its own: `python -m support.rounds PORT [drive]`, or
`python -m support.rounds attach ADDRESS ADDRESS`, which attaches.

What it says and gives follows from its seeds and from what was said, so a repeated attempt goes as the first.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

from paceline.sdk import Environment, Message, Observation, Outcome, attach_environment, serve_environment

LONGEST = 8


def number_of(text: str) -> int:
    """A number that follows from a text."""
    return hashlib.blake2b(text.encode(), digest_size=2).digest()[0]


class Rounds(Environment):
    """Asks 1 to 8 times."""

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        self.num_turns = 1 + episode_seed % LONGEST
        self.said = [f"{task_seed}/{episode_seed}"]
        return Observation()

    async def step(self, action: Message) -> Observation:
        self.said.append(action.content)
        over = len(self.said) > self.num_turns
        return Observation(done="over") if over else Observation(text=str(number_of("".join(self.said))))

    async def close(self, stop_reason: str) -> Outcome:
        rounds = float(len(self.said) - 1)
        return Outcome(reward=float(number_of("".join(self.said))), components={"rounds": rounds})


class Driven(Rounds):
    """The same, led by itself over HTTP."""

    async def run(self, *, base_url: str, token: str, model: str) -> str:
        import aiohttp

        messages: list[dict[str, object]] = [{"role": "user", "content": "Go."}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http:
            while True:
                url, body = f"{base_url}/chat/completions", {"messages": messages}
                async with http.post(url, json=body, timeout=aiohttp.ClientTimeout(20)) as answer:
                    answer.raise_for_status()
                    said = (await answer.json())["choices"][0]["message"]
                observation = await self.step(Message(role="assistant", content=said["content"] or ""))
                if observation.done:
                    return observation.done
                messages += [said, {"role": "user", "content": observation.text}]


if __name__ == "__main__":
    if sys.argv[1] == "attach":
        attach_environment(Rounds, address=sys.argv[2:], name="rounds", token="secret")
    else:
        made = Driven if sys.argv[2:] == ["drive"] else Rounds
        serve_environment(made, port=int(sys.argv[1]), token="secret", max_episodes=1024)
