"""`paceline train` without fakes: whole runs, undisturbed, with processes that die, and stopped early."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest

from paceline.controller.verify.check import verify
from support.training_run import (
    REWARDS,
    Row,
    TrainingRun,
    assert_same_metrics,
    prepare_inputs,
    tiny_config,
    training,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 5, 16, 4
LOSSES = ("actor/pg_loss", "critic/vf_loss", "algorithm/reference_kl", "actor/grad_norm", "critic/grad_norm")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    return prepare_inputs(folder, num_train=NUM_STEPS * NUM_PROMPTS, num_val=8)


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRun]:
    """Five steps with one rollout server and two learner ranks; other runs are compared with it."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with training(tiny_config(inputs, trainer={"total_steps": NUM_STEPS}), folder) as run:
        run.wait_for_phase("collect", 1)
        run.look()
        assert run.finish() == 0, run.output
        yield run


def only(events: list[Row], kind: str) -> list[Row]:
    return [event for event in events if event["event"] == kind]


def admitted(event: Row, *, step: int, server: str) -> bool:
    return (
        event["event"] == "trajectory"
        and event["verdict"] == "admitted"
        and event["server"] == server
        and event["id"].startswith(f"train:{step}:")
    )


def assert_sound(run: TrainingRun) -> None:
    assert [str(breach) for breach in verify(run.run_dir).breaches] == []


def assert_ended_in_order(run: TrainingRun, message: str) -> None:
    """All members left and none was killed; the journal and the note end with the reason."""
    events = run.events
    assert [(e["ok"], e["message"]) for e in only(events, "end")][-1] == (message.endswith("done"), message)
    last = {event["member"]: event["what"] for event in only(events, "member")}
    assert set(last.values()) == {"left"}, last
    log = (run.run_dir / "logs/launcher.log").read_text()
    assert "killed" not in log, log
    assert (run.note["state"], run.note["pids"], run.note["token"]) == ("ended", {}, "")


def test_an_undisturbed_run(undisturbed: TrainingRun) -> None:
    run = undisturbed
    assert [row["step"] for row in run.metrics] == list(range(NUM_STEPS + 1))
    for row in run.metrics[1:]:
        assert abs(row["actor/first_ppo_kl"]) < 1e-6
        assert row["actor/first_pg_clipfrac"] == 0
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["barrier/admitted"] == NUM_PROMPTS * NUM_SAMPLES
        assert row["actor/grad_norm"] > 0
        assert row["barrier/rejected"] == row["barrier/duplicates"] == row["barrier/groups_dropped"] == 0
    # The critic learns the mean reward within the steps; the policy has moved away from the reference.
    assert run.metrics[-1]["critic/vf_loss"] < run.metrics[1]["critic/vf_loss"] / 2
    assert run.metrics[-1]["algorithm/reference_kl"] > run.metrics[1]["algorithm/reference_kl"] == 0
    assert "val/reward/mean" in run.metrics[0]
    assert "val/reward/mean" in run.metrics[-1]
    assert_sound(run)
    assert_ended_in_order(run, f"{NUM_STEPS} steps done")
    assert (run.run_dir / "report.html").stat().st_size > 10_000
    manifests = sorted(run.run_dir.glob("checkpoints/step_*/manifest.json"))
    assert [path.parent.name for path in manifests] == ["step_000004", "step_000005"]
    assert len(list((run.run_dir / "trajectories").glob("step_*.parquet"))) == NUM_STEPS


def test_a_step_is_one_trace_through_all_services(undisturbed: TrainingRun) -> None:
    spans = undisturbed.spans
    by_id = {span["span_id"]: span for span in spans}
    roots = {
        span["attributes"]["paceline.step"]: span
        for span in spans
        if span["name"] == "step" and not span["parent_id"]
    }
    assert sorted(roots) == list(range(1, NUM_STEPS + 1))
    for root in roots.values():
        trace = [span for span in spans if span["trace_id"] == root["trace_id"]]
        assert {span["service"] for span in trace} == {
            f"paceline.{name}" for name in ("controller", "rollout", "reward", "learner")
        }
        assert [s["name"] for s in trace if s["parent_id"] not in by_id] == ["step"]
        names = Counter(span["name"] for span in trace)
        assert names["rollout.generate"] >= NUM_PROMPTS
        assert names["learner.train_step"] == 1
        # A generation's parent is the dispatch that asked for it; a scoring's parent is the generation.
        parents = {by_id[s["parent_id"]]["name"] for s in trace if s["name"] == "rollout.generate"}
        assert "dispatch" in parents
        assert {by_id[s["parent_id"]]["name"] for s in trace if s["name"] == "reward.score"} == {
            "rollout.generate"
        }


def test_two_servers_give_the_same_metrics_even_if_one_dies(
    inputs: Path, undisturbed: TrainingRun, tmp_path: Path
) -> None:
    """The same seed: steps 1 and 2 on two servers; one of them dies in step 3; the rest runs on the other."""
    config = tiny_config(inputs, trainer={"total_steps": NUM_STEPS})
    config["rollout"]["replicas"] = 2
    with training(config, tmp_path / "run") as run:
        run.wait_for(lambda e: admitted(e, step=3, server="rollout-1"))
        run.kill_group("rollout-1")
        assert run.finish() == 0, run.output
        assert_sound(run)
        servers: dict[int, Counter[str]] = {step: Counter() for step in range(1, NUM_STEPS + 1)}
        for event in only(run.events, "trajectory"):
            kind, step, *_ = event["id"].split(":")
            if kind == "train":
                servers[int(step)][event["server"]] += 1
        for step, counts in servers.items():
            assert set(counts) == ({"rollout-0", "rollout-1"} if step <= 3 else {"rollout-0"}), counts
        dead = [e["member"] for e in only(run.events, "member") if e["what"] == "dead"]
        assert dead == ["rollout-1"]
        assert "rollout-1 ended unexpectedly (killed by SIGKILL)" in run.output
        # What the dead server sent without an acknowledgement comes again, in time for its step or too late.
        repeats = sum(row["barrier/duplicates"] + row["barrier/rejected"] for row in run.metrics[1:])
        assert repeats <= config["rollout"]["max_groups_in_flight"] * NUM_SAMPLES
        assert_same_metrics(
            run.metrics,
            undisturbed.metrics,
            without=("weights/bytes", "barrier/duplicates", "barrier/rejected"),
        )


def test_one_rank_learns_what_two_learn_and_ctrl_c_ends_it(
    inputs: Path, undisturbed: TrainingRun, tmp_path: Path
) -> None:
    config = tiny_config(inputs, trainer={"total_steps": NUM_STEPS + 1}, learner={"world_size": 1})
    with training(config, tmp_path / "run") as run:
        run.wait_for_phase("learn", NUM_STEPS + 1)
        run.look()
        began = time.monotonic()
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
        assert run.finish(timeout_s=40) == 130, run.output
        assert time.monotonic() - began < 30
        assert_sound(run)
        assert_ended_in_order(run, f"stopped in step {NUM_STEPS + 1}: stopped by SIGINT")
        for row, expected in zip(run.metrics[1:], undisturbed.metrics[1:], strict=True):
            for name in LOSSES:
                assert row[name] == pytest.approx(expected[name], abs=1e-4), (row["step"], name)


def test_a_lost_learner_comes_back_and_the_same_command_goes_on_after_the_launcher(
    inputs: Path, undisturbed: TrainingRun, tmp_path: Path
) -> None:
    config = tiny_config(inputs, trainer={"total_steps": NUM_STEPS})
    with training(config, tmp_path / "run") as run:
        run.wait_for_phase("learn", 2)
        run.kill_group("learner-1")
        run.wait_for_phase("learn", 4)
        assert "learner-1 ended unexpectedly (killed by SIGKILL)" in run.output
        assert "starting the learner again (1 of at most" in run.output
        run.look()
        run.process.kill()
        run.process.wait(10)
        began = time.monotonic()
        while run.left():
            assert time.monotonic() - began < 40, run.left()
            time.sleep(0.2)
    with training(config, tmp_path / "run") as run:
        assert run.finish() == 0, run.output
        first, second = only(run.events, "run")
        assert (first["step"], first["term"], second["term"]) == (0, 1, 2)
        assert 0 < second["step"] <= 3
        assert_sound(run)
        assert_same_metrics(
            run.metrics, undisturbed.metrics, without=("barrier/duplicates", "barrier/rejected")
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_all_processes_end_if_the_launcher_is_killed_during_the_start(
    inputs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The engine and the ranks are still starting; if the launcher is killed, all must end by themselves."""
    with training(tiny_config(inputs), tmp_path / "run") as run:
        for name in ("reward-0", "learner-0", "rollout-0"):
            run.wait_for_member(name)
        run.look()
        began = time.monotonic()
        os.kill(run.pid_of("launcher"), number)
        code = run.process.wait(40)
        while run.left():
            assert time.monotonic() - began < 40, run.left()
            time.sleep(0.2)
        assert code == (143 if number == signal.SIGTERM else -number)


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
    )
    with training(config, tmp_path / "run") as run:
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
    """The rewards of four of eight prompts fail in different ways; from step 3 on all fail."""
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
            "timeout_s": 1.0,
            "max_retries": 0,
            "max_deliveries": 1,
        },
        actor={"ppo_mini_batch_size": 4},
        trainer={"total_steps": 50, "save_freq": 0},
        learner={"world_size": 1},
    )
    with training(config, tmp_path / "run") as run:
        run.wait_for_phase("learn", 2)
        faults.write_text("*=raise")
        assert run.finish() == 1, run.output
        assert_sound(run)
        for step in (1, 2):
            dropped = {
                e["reason"]: e["message"] for e in only(run.events, "group_dropped") if e["step"] == step
            }
            assert sorted(dropped) == [
                f"reward:{kind}" for kind in ("not_finite", "raised", "timeout", "wrong_type")
            ]
            assert "KeyError" in dropped["reward:raised"]
            assert "no rubric for" in dropped["reward:raised"]
            assert "1 s" in dropped["reward:timeout"]
            assert "nan" in dropped["reward:not_finite"]
            assert "str" in dropped["reward:wrong_type"]
            assert run.metrics[step]["barrier/groups_dropped"] == 4
            assert run.metrics[step]["actor/grad_norm"] > 0
        said = [line for line in run.output.splitlines() if line.startswith("paceline train:")]
        assert len(said) == 1, run.output
        for part in ("step 3: 8 of 8 prompt groups have no reward", "KeyError", "reward.max_dropped_share"):
            assert part in said[0], said
        assert [row["step"] for row in run.metrics] == [0, 1, 2]
