"""`paceline train` without fakes, where prompt groups are refilled, or dropped for their rewards."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest

from support.training_run import REWARDS, assert_sound, only, tiny_config, training

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(1200)]

NUM_PROMPTS = 16  # of each step


def test_refills_and_greedy_answers_on_two_servers(inputs: Path, tmp_path: Path) -> None:
    config = tiny_config(
        inputs,
        algorithm={
            "adv_estimator": "remax",
            "use_kl_in_reward": False,
            "kl_ctrl": {"type": "fixed"},
            "dynamic_sampling": {"enable": True, "max_extra_factor": 1.0},
        },
        actor={"ratio_audit_freq": 1},
        rollout={"n": 2, "replicas": 2},
        reward={"functions": [{"name": f"{REWARDS}:first_letter"}]},
        trainer={"total_steps": 2, "save_freq": 0},
        learner={"world_size": 1},
    )
    with training(config, tmp_path / "run", forked=True) as run:
        assert run.finish() == 0, run.output
        assert_sound(run)
        assert {e["server"] for e in only(run.events, "trajectory")} == {"rollout-0", "rollout-1"}
        for row in run.metrics[1:]:
            step, num_extra = row["step"], row["dynamic_sampling/extra_prompts"]
            ids = [e["id"].split(":") for e in only(run.events, "trajectory")]
            greedy = [prompt for purpose, s, prompt, _ in ids if (purpose, s) == ("greedy", str(step))]
            assert len(greedy) == len(set(greedy)) == NUM_PROMPTS + num_extra
            assert row["barrier/admitted"] == 3 * len(greedy)
            table = pyarrow.parquet.read_table(run.run_dir / f"trajectories/step_{step:06d}.parquet")
            kept = set(table["prompt_id"].to_pylist())
            aside = {p for e in only(run.events, "refill") if e["step"] == step for p, _ in e["set_aside"]}
            assert len(aside) >= num_extra > 0
            assert kept | aside == {int(prompt) for prompt in greedy}
            assert not kept & aside
            assert row["dynamic_sampling/kept_share"] == len(kept) / len(greedy)
            assert row["actor/first_ppo_kl"] == 0
            assert row["actor/grad_norm"] > 0


def few_prompts(inputs: Path, folder: Path, count: int) -> tuple[Path, list[str]]:
    """A file with `count` prompts of different sums, and the sums."""
    table = pyarrow.parquet.read_table(inputs / "data/train.parquet")
    first: dict[str, int] = {}
    for index, truth in enumerate(table["ground_truth"].to_pylist()):
        first.setdefault(truth, index)
    picked = list(first.items())[:count]
    path = folder / "few.parquet"
    pyarrow.parquet.write_table(table.take([index for _, index in picked]), path)
    return path, [truth for truth, _ in picked]


def test_failed_rewards_drop_their_groups_and_end_the_run_when_all_fail(inputs: Path, tmp_path: Path) -> None:
    """The rewards of four of eight prompts fail in different ways, and after two steps or more all fail."""
    file, truths = few_prompts(inputs, tmp_path, 8)
    faults = tmp_path / "faults"
    kinds = ("raise", "hang", "nan", "type")
    faults.write_text(",".join(f"{truth}={kind}" for truth, kind in zip(truths, kinds, strict=False)))
    config = tiny_config(
        inputs,
        data={"train_files": str(file), "val_files": [], "train_batch_size": 8},
        rollout={"n": 2},
        reward={
            "functions": [{"name": f"{REWARDS}:moody", "kwargs": {"faults_file": str(faults)}}],
            "timeout_s": 4.0,
            "max_deliveries": 1,
        },
        actor={"ppo_mini_batch_size": 4},
        trainer={"total_steps": 50, "save_freq": 0},
        learner={"world_size": 1},
    )
    with training(config, tmp_path / "run", forked=True) as run:
        run.wait_for_phase("learn", 2)
        # Nothing is scored until the next step is dispatched.
        with run.paused_in("learn", "publish", "commit") as last:
            faults.write_text("*=raise")
        assert run.finish() == 1, run.output
        assert_sound(run)
        for step in range(1, last + 1):
            dropped = {
                e["reason"]: e["message"] for e in only(run.events, "group_dropped") if e["step"] == step
            }
            assert sorted(dropped) == [
                f"reward:{kind}" for kind in ("not_finite", "raised", "timeout", "wrong_type")
            ]
            assert "KeyError" in dropped["reward:raised"]
            assert "no rubric for" in dropped["reward:raised"]
            assert "4 s" in dropped["reward:timeout"]
            assert "nan" in dropped["reward:not_finite"]
            assert "str" in dropped["reward:wrong_type"]
            assert run.metrics[step]["barrier/groups_dropped"] == 4
            assert run.metrics[step]["actor/grad_norm"] > 0
        said = [line for line in run.output.splitlines() if line.startswith("paceline train:")]
        assert len(said) == 1, run.output
        fault = f"step {last + 1}: 8 of 8 prompt groups have no reward"
        for part in (fault, "KeyError", "reward.max_dropped_share"):
            assert part in said[0], said
        assert [row["step"] for row in run.metrics] == list(range(last + 1))
