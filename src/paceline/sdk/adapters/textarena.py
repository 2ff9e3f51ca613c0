"""Wraps games of the library `textarena`; the policy is one of the players."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.samples.chat import Message
from paceline.sdk.environment import Environment, Observation, Outcome, environment_maker

_OWN_ACTION = "PLAYER_ACTION"
_seeding = threading.Lock()
"""Held while a game begins: the library then seeds Python's global generator."""


def textarena_environment(
    make: Callable[[], Any],
    *,
    num_players: int = 1,
    player: int = 0,
    opponent: Callable[[int, str], str] | None = None,
) -> Callable[[], Environment]:
    """Turns a game of `textarena` into an argument of `serve_environment`.

    The reward is the player's, or 0 if a limit of the run ends the game. All episodes of a prompt begin with
    the same seed; later random draws of a game come from the process's generator.

    Args:
        make: makes one game, such as `lambda: textarena.make("TicTacToe-v0-raw")`. Games named
            "-raw" show only what is new since the last turn; others repeat the game, and the part already
            known is cut off.
        num_players: number of players of the game.
        player: the policy's number.
        opponent: returns the move of another player from its number and text; it runs in a thread.
    """
    if num_players > 1 and opponent is None:
        raise ValueError(f"a game of {num_players} players needs `opponent`, which makes the others' moves")

    return environment_maker("textarena", lambda: _Game(make, num_players, player, opponent))


class _Game(Environment):
    def __init__(
        self,
        make: Callable[[], Any],
        num_players: int,
        player: int,
        opponent: Callable[[int, str], str] | None,
    ) -> None:
        self._make, self._num_players, self._player, self._opponent = make, num_players, player, opponent
        self._game: Any = None
        self._is_over = False
        self._said: dict[int, str] = {}

    async def open(self, task: Mapping[str, Any], *, task_seed: int, episode_seed: int) -> Observation:
        return Observation(text=await asyncio.to_thread(self._begin, task_seed))

    async def step(self, action: Message) -> Observation:
        text = await asyncio.to_thread(self._move, action.content)
        return Observation(text=text, done="game_over" if self._is_over else "")

    async def close(self, stop_reason: str) -> Outcome:
        rewards, info = self._game.close()
        own = (info or {}).get(self._player, {})
        numbers = {
            name: float(own[name]) for name in ("turn_count", "invalid_move") if own.get(name) is not None
        }
        return Outcome(reward=float((rewards or {}).get(self._player, 0.0)), components=numbers)

    def _begin(self, seed: int) -> str:
        with _seeding:
            self._game = self._make()
            self._game.reset(num_players=self._num_players, seed=seed)
        return self._until_turn()

    def _move(self, action: str) -> str:
        self._is_over, _ = self._game.step(action=action)
        return self._until_turn()

    def _until_turn(self) -> str:
        """Lets the others move until the policy's turn; returns its text, "" when the game is over."""
        while not self._is_over:
            who, seen = self._game.get_observation()
            text = self._new_text(who, seen)
            if who == self._player:
                return text
            assert self._opponent is not None, "the game has one player"
            self._is_over, _ = self._game.step(action=self._opponent(who, text))
        return ""

    def _new_text(self, who: int, seen: Any) -> str:
        """Returns the text that is new to a player, without its own moves if the game marks them."""
        if not isinstance(seen, str):
            return "\n".join(
                message
                for sender, message, kind in seen
                if not (sender == who and getattr(kind, "name", "") == _OWN_ACTION)
            ).strip()
        before, self._said[who] = self._said.get(who, ""), seen
        return seen.removeprefix(before).strip()
