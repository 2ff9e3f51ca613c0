"""Environments of users, good ones and bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.sdk import Environment, Message, Observation, Outcome, tool


class Guess(Environment):
    """A number from 0 to 9 that is to be found with a tool."""

    released: ClassVar[list[int]] = []

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        self.word, self.turns, self.won = task_seed % 10, 0, False
        self.seeds = (task_seed, episode_seed)
        return Observation(text="Guess a digit.")

    @tool(timeout_s=0.5)
    async def guess(self, digit: int) -> str:
        """Says whether a digit is too low or too high."""
        self.turns += 1
        self.won = digit == self.word
        return "right" if self.won else ("too low" if digit < self.word else "too high")

    @tool(timeout_s=0.3)
    async def ponder(self) -> str:
        """Never answers."""
        await asyncio.sleep(60)
        return ""

    @tool()
    def stumble(self) -> str:
        """Raises, in a thread."""
        raise ValueError("no such thing")

    async def step(self, action: Message) -> Observation:
        said = await self.call_tools(action)
        return Observation(messages=said.messages, done="won" if self.won else said.done)

    async def close(self, stop_reason: str) -> Outcome:
        return Outcome(reward=float(self.won), components={"turns": float(self.turns)})

    async def release(self) -> None:
        Guess.released.append(self.turns)


class Bad(Guess):
    """Breaks the contract in the way that `fault` says."""

    fault: ClassVar[str] = ""

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        if self.fault == "raise in open":
            raise KeyError("word")
        if self.fault == "unknown tool":
            return Observation(tools=("none",))
        return await super().open(task, task_seed=task_seed, episode_seed=episode_seed)

    async def step(self, action: Message) -> Observation:
        if self.fault == "raise in step":
            raise RuntimeError("broken")
        if self.fault == "hang in step":
            await asyncio.sleep(60)
        if self.fault == "silent":
            return Observation()
        if self.fault == "wrong role":
            return Observation(messages=(Message(role="ghost", content="x"),))
        return await super().step(action)

    async def close(self, stop_reason: str) -> Outcome:
        if self.fault == "nan":
            return Outcome(reward=float("nan"))
        if self.fault == "text":
            return Outcome(reward="much")  # type: ignore[arg-type]
        return await super().close(stop_reason)
