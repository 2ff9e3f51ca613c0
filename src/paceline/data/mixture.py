"""Draws the prompts of a step from one or several sets, deterministically; can be saved and resumed.

For each prompt of a step, every set's due count grows by the set's share, and the set with the largest due
count supplies the prompt. So the counts of a step and of all steps follow the weights as closely as whole
prompts can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from paceline.config.mixture import WeightsFrom
from paceline.core.errors import CheckpointError, DataError
from paceline.data.cursor import CursorState, PromptCursor


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureState:
    """The position in all sets.

    Attributes:
        due: each set's due count in prompts: its share of the prompts drawn so far, minus those it supplied.
        chosen: the weights that a function chose for the next step; None: those of the configuration.
    """

    walks: tuple[CursorState, ...]
    due: tuple[float, ...]
    chosen: tuple[float, ...] | None = None

    @classmethod
    def of_one(cls, *, epoch: int, position: int) -> Self:
        """Returns the position in a single set."""
        return cls(walks=(CursorState(epoch=epoch, position=position),), due=(0.0,))

    def to_plain(self) -> dict[str, Any]:
        """Returns the state as JSON data; for a single set, its epoch and position."""
        if len(self.walks) == 1:
            return asdict(self.walks[0])
        plain = {"walks": [[w.epoch, w.position] for w in self.walks], "due": list(self.due)}
        return plain if self.chosen is None else {**plain, "chosen": list(self.chosen)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Reads what `to_plain` returned; raises KeyError, TypeError or ValueError if it is malformed."""
        if "walks" not in plain:
            return cls.of_one(**plain)
        chosen = plain.get("chosen")
        return cls(
            walks=tuple(CursorState(epoch=epoch, position=position) for epoch, position in plain["walks"]),
            due=tuple(map(float, plain["due"])),
            chosen=None if chosen is None else tuple(map(float, chosen)),
        )


class PromptMixture:
    """Draws each step's prompts from one or several sets.

    Args:
        sets: the prompt ids of each set by name, in the configuration's order; sets share no id.
        batch_size: ids per step.
        shuffle: False walks through each set in ascending order.
        ranks: rank of each id within an epoch of its set; None: all are equal.
        schedule: weights with the step from which they apply, ordered, the first from step 1 on. None: all
            weights are equal.

    Raises:
        DataError: there are fewer ids than a step needs, in total or, by its weight, in one set.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[int]],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        ranks: Mapping[int, int] | None = None,
        schedule: Sequence[WeightsFrom] = (),
    ) -> None:
        self.names = tuple(sets)
        self._walks = [
            PromptCursor(ids, seed=seed, shuffle=shuffle, stream=stream, ranks=ranks)
            for stream, ids in enumerate(sets.values())
        ]
        self._batch_size = batch_size
        self._schedule = schedule or (WeightsFrom(step=1, weights=(1.0,) * len(self._walks)),)
        self._due = [0.0] * len(self._walks)
        self._chosen: tuple[float, ...] | None = None
        self._shares = _shares(self._schedule[0].weights)
        self._check_sizes()

    def ranges(self) -> list[list[tuple[int, int, int]]]:
        """Returns each set's runs of consecutive ids with the same rank: first and last id, and the rank."""
        return [walk.ranges() for walk in self._walks]

    def set_of(self, prompt_id: int) -> str | None:
        """Returns the set of a prompt; None for a prompt of no set, such as one that a dataflow made."""
        return next(
            (name for name, walk in zip(self.names, self._walks, strict=True) if prompt_id in walk), None
        )

    @property
    def state(self) -> MixtureState:
        """The position, for a checkpoint."""
        walks = tuple(walk.state for walk in self._walks)
        return MixtureState(walks=walks, due=tuple(self._due), chosen=self._chosen)

    def restore(self, state: MixtureState) -> None:
        """Goes to position `state`; raises CheckpointError if these sets have no such position."""
        num_sets = len(self._walks)
        if any(len(part) != num_sets for part in (state.walks, state.due, state.chosen or state.due)):
            raise CheckpointError(
                f"the checkpoint has positions in {len(state.walks)} training sets, but there are "
                f"{num_sets}; resume with the data.train_sets of the first run"
            )
        for walk, position in zip(self._walks, state.walks, strict=True):
            if walk.state != position:  # Restoring shuffles the epoch again
                walk.restore(position)
        self._due, self._chosen = list(state.due), state.chosen

    def choose(self, weights: Sequence[float]) -> None:
        """Sets the weights of the next and later steps, in place of the schedule's."""
        self._chosen = tuple(weights)

    def weights(self, step: int) -> tuple[float, ...]:
        """Returns the weights of the sets in a step."""
        if self._chosen is not None:
            return self._chosen
        return next(stage.weights for stage in reversed(self._schedule) if stage.step <= step)

    def take(self, step: int) -> list[int]:
        """Returns the ids of a step, grouped by set."""
        self._shares = _shares(self.weights(step))
        counts = [0] * len(self._walks)
        for _ in range(self._batch_size):
            open_sets = [i for i, walk in enumerate(self._walks) if counts[i] < walk.num_ids]
            counts[self._next(open_sets)] += 1
        used_up = [i for i, walk in enumerate(self._walks) if counts[i] == walk.num_ids]
        if any(self._due[place] >= 1.0 for place in used_up):
            # Prompts that a set could not supply in a step are not drawn later.
            self._due = [0.0] * len(self._walks)
        return [i for walk, count in zip(self._walks, counts, strict=True) if count for i in walk.take(count)]

    def take_more(self, count: int, *, without: Collection[int]) -> list[int]:
        """Returns the next `count` ids that are not in `without`, by the weights of the last step.

        Returns fewer if there are no others. Several calls, each excluding the ids of earlier calls, return
        the same ids as a single call.
        """
        taken: list[int] = []
        passed = [{i for i in without if i in walk} for walk in self._walks]
        open_sets = list(range(len(self._walks)))
        while len(taken) < count and open_sets:
            before = list(self._due)
            place = self._next(open_sets)
            drawn = self._walks[place].take_more(1, without=passed[place])
            if not drawn:
                self._due = before
                open_sets.remove(place)
            taken += drawn
            passed[place].update(drawn)
        return taken

    def _next(self, open_sets: Sequence[int]) -> int:
        """Returns the set of the next prompt; sets of weight 0 only if no other set has prompts left."""
        self._due = [due + share for due, share in zip(self._due, self._shares, strict=True)]
        wanted = [place for place in open_sets if self._shares[place]] or open_sets
        chosen = max(wanted, key=lambda place: (self._due[place], -place))
        self._due[chosen] -= 1.0
        return chosen

    def _check_sizes(self) -> None:
        sizes = [walk.num_ids for walk in self._walks]
        if sum(sizes) < self._batch_size:
            raise DataError(
                f"{sum(sizes)} usable prompts cannot fill data.train_batch_size={self._batch_size}; "
                "lower it or add prompts"
            )
        for stage in self._schedule:
            for name, size, share in zip(self.names, sizes, _shares(stage.weights), strict=True):
                if size < int(share * self._batch_size):
                    raise DataError(
                        f"data.train_sets.{name} has {size} usable prompts, but from step {stage.step} on "
                        f"its weight asks for {share * self._batch_size:g} different ones of "
                        f"data.train_batch_size={self._batch_size} in each step; lower its weight or the "
                        "batch size, or add prompts"
                    )


def _shares(weights: Sequence[float]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)
