"""TRL's batch arithmetic: the sizes of generation batches and updates, and how many there are.

With b = per_device_train_batch_size, D processes, a = gradient_accumulation_steps, s = steps_per_generation,
mu = num_iterations and G = num_generations: a generation batch has b D s samples, an update b D a; each is
used mu times, so that a generation batch is followed by s mu / a updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from paceline.cli.convert.rules import DEVICES, NUM_ROWS, Changed, Tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """The counts of one step of ours.

    Attributes:
        prompts: prompts of a step, each with `num_generations` samples: data.train_batch_size.
        prompts_per_update: actor.ppo_mini_batch_size.
        epochs: passes over the step's samples: actor.ppo_epochs.
        generations: TRL's generation batches per step of ours; one, unless updates are larger.
    """

    prompts: int
    prompts_per_update: int
    epochs: int
    generations: int = 1

    @property
    def updates(self) -> int:
        """Optimizer steps per training step."""
        return self.epochs * self.prompts // self.prompts_per_update

    @classmethod
    def of(cls, tree: Tree) -> Self:
        """Computes the counts from TRL's values, including defaults.

        Raises:
            ValueError: TRL would refuse them too, or an update would not have whole prompt groups.
        """
        samples, devices = int(tree["per_device_train_batch_size"]), int(tree.get(DEVICES) or 1)
        group, accumulated = int(tree["num_generations"]), int(tree["gradient_accumulation_steps"])
        per_micro_step, iterations = samples * devices, int(tree["num_iterations"])
        per_generation = _steps_per_generation(tree, per_micro_step, accumulated) * per_micro_step
        per_update = per_micro_step * accumulated
        if per_generation % group:
            raise ValueError(
                f"a generation batch of {per_generation} samples ({samples} x {devices} processes x "
                f"steps_per_generation) has no whole groups of num_generations={group}; TRL refuses it too: "
                "give --devices the number of processes that it was started with"
            )
        if per_update % group:
            raise ValueError(
                f"an update of {per_update} samples is {per_update / group:g} groups of num_generations="
                f"{group}, and here an update has whole groups: raise gradient_accumulation_steps to "
                f"{math.lcm(per_micro_step, group) // per_micro_step}, or give --devices"
            )
        if per_generation % per_update == 0:
            prompts = per_generation // group
            return cls(prompts=prompts, prompts_per_update=per_update // group, epochs=iterations)
        if per_update % per_generation == 0 and iterations == 1:
            prompts = per_update // group
            return cls(
                prompts=prompts,
                prompts_per_update=prompts,
                epochs=1,
                generations=per_update // per_generation,
            )
        raise ValueError(
            f"updates of {per_update} samples from generation batches of {per_generation}, each used "
            f"{iterations} times: an update would mix samples of several policies, which a step here never "
            "does; make gradient_accumulation_steps divide steps_per_generation"
        )


def _steps_per_generation(tree: Tree, per_micro_step: int, accumulated: int) -> int:
    steps, samples = tree.get("steps_per_generation"), tree.get("generation_batch_size")
    if steps is not None and samples is not None:
        raise ValueError("generation_batch_size and steps_per_generation are both set, which TRL refuses too")
    if samples is None:
        return accumulated if steps is None else int(steps)
    if int(samples) % per_micro_step:
        raise ValueError(
            f"generation_batch_size={samples} is not a multiple of the {per_micro_step} samples that all "
            "processes take at a time, which TRL refuses too; give --devices"
        )
    return int(samples) // per_micro_step


def total_updates(tree: Tree) -> int:
    """Returns the optimizer steps of the whole run: max_steps, or those of num_train_epochs.

    Raises:
        ValueError: it depends on the number of rows, which is not known.
    """
    batches = Batches.of(tree)
    if int(tree.get("max_steps") or -1) > 0:
        return int(tree["max_steps"])
    epochs, rows = float(tree["num_train_epochs"]), tree.get(NUM_ROWS)
    if rows is None:
        raise ValueError(
            f"depends on the rows of the training files, which are not here: trainer.total_steps is "
            f"{epochs:g} x (rows // {batches.prompts})"
        )
    return math.ceil(epochs * _updates_per_epoch(batches, int(rows)))


def _updates_per_epoch(batches: Batches, rows: int) -> int:
    generations = rows // (batches.prompts // batches.generations)
    return max(1, math.ceil(generations * batches.updates / batches.generations))


def batch_sizes(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the sizes of a step and of its updates, in prompts."""
    batches = Batches.of(tree)
    ours = {
        "data.train_batch_size": batches.prompts,
        "actor.ppo_mini_batch_size": batches.prompts_per_update,
        "actor.ppo_epochs": batches.epochs,
    }
    if batches.prompts == batches.prompts_per_update:
        return ours
    return Changed(
        ours,
        "TRL gives the samples of a generation batch to its updates one by one; here an update has whole "
        "groups",
    )


def length(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the length of the run: epochs, or the training steps that make this number of updates."""
    if int(value or -1) <= 0 and Batches.of(tree).generations == 1:
        return {"trainer.total_epochs": float(tree["num_train_epochs"])}
    return _in_steps("trainer.total_steps", total_updates(tree), tree)


def every(key: str, updates: float, tree: Tree) -> Tree | Changed:
    """Returns a frequency in updates, or as a share of the run below 1, in training steps."""
    count = math.ceil(updates * total_updates(tree)) if 0 < updates < 1 else int(updates)
    return _in_steps(key, count, tree)


def every_epoch(key: str, tree: Tree) -> Tree | Changed:
    """Returns the frequency of once per pass over the rows, in training steps."""
    rows, batches = tree.get(NUM_ROWS), Batches.of(tree)
    if rows is None:
        raise ValueError(f"depends on the rows of the training files: {key} is rows // {batches.prompts}")
    return _in_steps(key, _updates_per_epoch(batches, int(rows)), tree)


def warmup_share(value: Any, tree: Tree) -> Tree | Changed:
    """Returns the share of the run over which the rate rises; from 1 on, the value counts updates."""
    share = float(value or 0)
    if share >= 1:
        share = share / total_updates(tree)
    return {"actor.optim.warmup_steps_ratio": share}


def _in_steps(key: str, updates: int, tree: Tree) -> Tree | Changed:
    per_step = Batches.of(tree).updates
    steps = {key: math.ceil(updates / per_step)}
    if updates % per_step == 0:
        return steps
    return Changed(
        steps, f"a step here has {per_step} updates, and {updates} are not a whole number of steps"
    )
