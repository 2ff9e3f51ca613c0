"""`paceline train` without fakes: whole runs, undisturbed, with processes that die, and stopped early, and
one whose rows come from an environment of one turn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet
import pytest

from paceline.core.run_record.step_metrics import meaning
from paceline.service.observability.metrics import training as exported
from support import owned_rows
from support.training_rewards import WAITS_AT_MOST_S
from support.training_run import (
    REWARDS,
    ROOT,
    TRANSPORT,
    Row,
    TrainingRun,
    assert_same_metrics,
    assert_sound,
    is_time,
    only,
    read_jsonl,
    tiny_config,
    training,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

EXPORTED = ROOT / "deploy" / "observability" / "exported-metrics.txt"
NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 3, 16, 4
LOSSES = ("actor/pg_loss", "critic/vf_loss", "algorithm/reference_kl", "actor/grad_norm", "critic/grad_norm")


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRun]:
    """Three steps with one rollout server and two learner ranks; other runs are compared with it."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    trainer = {"total_steps": NUM_STEPS, "export_model": True}
    with training(tiny_config(inputs, data=drawn(inputs), trainer=trainer), folder) as run:
        run.wait_for_phase("collect", 1)
        run.look()
        assert run.finish() == 0, run.output
        yield run


def drawn(inputs: Path) -> dict[str, Any]:
    """A second set of held-out prompts, with longer responses than those that train and its own reward."""
    sampling = {"n": 2, "temperature": 1.0, "top_p": 0.99, "top_k": 2, "max_response_length": 24}
    files = str(inputs / "data/val.parquet")
    reward = {"functions": [{"name": f"{REWARDS}:num_chars", "weight": 0.5}]}
    return {"val_sets": {"drawn": {"files": files, "max_prompts": 4, **sampling, "reward": reward}}}


def admitted(event: Row, *, step: int) -> bool:
    return (
        event["event"] == "trajectory"
        and event["verdict"] == "admitted"
        and event["id"].startswith(f"train:{step}:")
    )


def assert_ended_in_order(run: TrainingRun, message: str) -> None:
    """All members left and none was killed; the journal and the note end with the reason."""
    events = run.events
    assert [(e["ok"], e["message"]) for e in only(events, "end")][-1] == (
        not message.startswith("stopped in"),
        message,
    )
    last = {event["member"]: event["what"] for event in only(events, "member")}
    # After a signal the controller waits for some seconds only. On a busy machine an engine takes longer to
    # end, and its server is silent meanwhile.
    leaving = {"left", "state:draining", "suspect"} if "SIG" in message else {"left"}
    assert set(last.values()) <= leaving, last
    log = (run.run_dir / "logs/launcher.log").read_text()
    assert "killed" not in log, log
    assert (run.note["state"], run.note["pids"], run.note["token"]) == ("ended", {}, "")


def servers_by_step(events: list[Row]) -> dict[int, Counter[str]]:
    """How many samples of each training step came from which server."""
    servers: dict[int, Counter[str]] = {step: Counter() for step in range(1, NUM_STEPS + 1)}
    for event in only(events, "trajectory"):
        kind, step, *_ = event["id"].split(":")
        if kind == "train":
            servers[int(step)][event["server"]] += 1
    return servers


def step_of_death(events: list[Row], server: str) -> int:
    """The step in which a server was found dead; it sends nothing of later steps until it is back."""
    step, died_in, away = 0, 0, False
    for event in events:
        if event["event"] == "phase":
            step = event["step"]
        elif event["event"] == "member" and event["member"] == server:
            if event["what"] == "dead":
                died_in, away = step, True
            elif event["what"] == "state:serving":
                away = False
        elif away and event["event"] == "trajectory" and event["server"] == server:
            assert int(event["id"].split(":")[1]) <= died_in, event
    return died_in


def truth_met_first(run: TrainingRun, inputs: Path, step: int) -> str:
    """A ground truth of one prompt of this step, of no validation and of no earlier step."""
    files = [run.run_dir / f"trajectories/step_{number:06d}.parquet" for number in range(1, step + 1)]
    *earlier, here = (
        Counter(pyarrow.parquet.read_table(file)["ground_truth"].to_pylist())
        for file in (inputs / "data/val.parquet", *files)
    )
    return next(
        truth
        for truth, count in here.items()
        if count == NUM_SAMPLES and not any(truth in counts for counts in earlier)
    )


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
    assert [
        name for row in run.metrics for name in row if name not in ("step", "time") and not meaning(name)
    ] == []
    assert [row["time"] for row in run.metrics] == sorted(row["time"] for row in run.metrics)
    # The critic learns the mean reward within the steps; the policy has moved away from the reference.
    assert run.metrics[-1]["critic/vf_loss"] < run.metrics[1]["critic/vf_loss"] / 2
    assert run.metrics[-1]["algorithm/reference_kl"] > run.metrics[1]["algorithm/reference_kl"] == 0
    assert "val/reward/mean" in run.metrics[0]
    assert "val/reward/mean" in run.metrics[-1]
    of_set = [row for row in held_out_rows(run) if row["val_set"] == "drawn"]
    assert len(of_set) == 4 * 2
    assert {json.loads(row["sampling"])["top_p"] for row in of_set} == {0.99}
    for row in held_out_rows(run):
        length = len(row["response"])
        components = json.loads(row["components"])
        if row["val_set"] == "drawn":
            assert (row["reward"], components) == (0.5 * length, {"num_chars": length})
        else:
            assert (row["reward"], components["letters/length"]) == (components["letters"], length)
    mean = fmean(row["reward"] for row in of_set)
    assert run.metrics[-1]["val/drawn/reward/mean"] == pytest.approx(mean)
    lengths = [row["num_response_tokens"] for row in of_set]
    assert 16 < max(lengths) <= 24
    assert run.metrics[-1]["val/drawn/response_length/mean"] == pytest.approx(fmean(lengths))
    # The untrained model finds hundreds of tokens about as likely; of two, each is drawn half the time.
    log_probs = [value for row in of_set for value in row["response_log_probs"]]
    assert -3 < min(log_probs) < -0.5 < max(log_probs) < 0
    assert_sound(run)
    assert_ended_in_order(run, f"{NUM_STEPS} steps done")
    assert (run.run_dir / "report.html").stat().st_size > 10_000
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (run.run_dir / "model").iterdir()
    }
    manifests = sorted(run.run_dir.glob("checkpoints/step_*/manifest.json"))
    assert [path.parent.name for path in manifests] == ["step_000002", "step_000003"]
    assert len(list((run.run_dir / "trajectories").glob("step_*.parquet"))) == NUM_STEPS


def held_out_rows(run: TrainingRun) -> list[Row]:
    """The answers of the last validation."""
    file = run.run_dir / "trajectories" / f"val_{NUM_STEPS:06d}.parquet"
    rows: list[Row] = pyarrow.parquet.read_table(file).to_pylist()
    return rows


def test_the_list_of_exported_metrics_has_each_number(undisturbed: TrainingRun) -> None:
    """If it does not: PACELINE_WRITE_NAMES=1 python -m pytest tests/deploy/test_observability.py"""
    listed = EXPORTED.read_text().split()
    numbers = {name for row in undisturbed.metrics for name in row if not name.startswith("val/drawn/")}
    numbers -= {"step", "time"}
    assert sorted(name for name in numbers if exported(name).name not in listed) == []


def test_the_saved_log_probs_of_engine_and_learner_agree(undisturbed: TrainingRun) -> None:
    """In float32, token by token; the largest difference is the one that the step reports."""
    for row in undisturbed.metrics[1:]:
        name = f"step_{row['step']:06d}.parquet"
        table = pyarrow.parquet.read_table(undisturbed.run_dir / "trajectories" / name)
        engine, learner = table["response_log_probs"].to_pylist(), table["learner_log_probs"].to_pylist()
        assert [len(sample) for sample in engine] == [len(sample) for sample in learner]
        apart = [abs(e - s) for pair in zip(engine, learner, strict=True) for e, s in zip(*pair, strict=True)]
        assert max(apart) < 1e-4
        assert max(apart) == pytest.approx(row["rollout/logprob_diff_max"], abs=1e-6)
        assert len({round(score, 3) for sample in learner for score in sample}) > 20


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
    """The same seed on two servers. The one that the first sample of step 2 comes from is killed; the step
    waits for that. It is started again.
    """
    released = tmp_path / "released"
    config = tiny_config(
        inputs,
        data=drawn(inputs),
        rollout={"replicas": 2},
        reward={
            "functions": [
                {
                    "name": f"{REWARDS}:letters",
                    "kwargs": {"late": truth_met_first(undisturbed, inputs, 2), "until": str(released)},
                }
            ],
            # The samples of that prompt occupy one each.
            "num_processes": NUM_SAMPLES + 1,
            "timeout_s": 2.0 * WAITS_AT_MOST_S,
        },
        trainer={"total_steps": NUM_STEPS},
    )
    with training(config, tmp_path / "run", forked=True) as run:
        killed = run.wait_for(lambda e: admitted(e, step=2))["server"]
        run.kill_group(killed)
        run.wait_for(lambda e: e["event"] == "member" and e["what"] == "dead")
        released.touch()
        assert run.finish() == 0, run.output
        assert_sound(run)
        servers = servers_by_step(run.events)
        assert step_of_death(run.events, killed) == 2
        # On a busy machine one may have all of a step; in step 3 the killed one has only begun to start.
        assert killed in servers[2], servers
        assert {server for counts in servers.values() for server in counts} == {"rollout-0", "rollout-1"}
        dead = [(e["member"], e["reason"]) for e in only(run.events, "member") if e["what"] == "dead"]
        assert dead == [(killed, "killed by SIGKILL")]
        assert f"{killed} ended unexpectedly (killed by SIGKILL)" in run.output
        # What the dead server sent without an acknowledgement comes again, in time for its step or too late.
        repeats = sum(row["barrier/duplicates"] + row["barrier/rejected"] for row in run.metrics[1:])
        assert repeats <= config["rollout"]["max_groups_in_flight"] * NUM_SAMPLES
        assert_same_metrics(
            run.metrics,
            undisturbed.metrics,
            without=TRANSPORT,
        )


def test_one_rank_learns_what_two_learn_and_ctrl_c_ends_it(
    inputs: Path, undisturbed: TrainingRun, tmp_path: Path
) -> None:
    config = tiny_config(inputs, trainer={"total_steps": 1000, "save_freq": 0}, learner={"world_size": 1})
    with training(config, tmp_path / "run", forked=True) as run:
        run.wait_for_phase("learn", NUM_STEPS)
        run.look()
        step = run.interrupt()
        assert run.finish() == 130, run.output
        assert_sound(run)
        last = run.metrics[-1]["step"]
        assert last in (step, step + 1)
        assert_ended_in_order(run, f"stopped after step {last} of 1000: SIGINT")
        assert f"the same command goes on after step {last}" in run.output
        for row, expected in zip(run.metrics[1 : NUM_STEPS + 1], undisturbed.metrics[1:], strict=True):
            for name in LOSSES:
                assert row[name] == pytest.approx(expected[name], abs=1e-4), (row["step"], name)


def test_an_environment_of_one_turn_that_owns_the_rows_gives_the_metrics_of_the_plain_path(
    inputs: Path, undisturbed: TrainingRun, tmp_path: Path
) -> None:
    """Two steps without a data file: its rows are those of the other run's files, with a number each."""
    files = {split: inputs / f"data/{split}.parquet" for split in ("train", "val")}
    token, log = tmp_path / "token", tmp_path / "environment.log"
    token.write_text("secret")
    with owned_rows.serving(files, log) as address:
        environment = {"address": address, "token_file": str(token)}
        config = tiny_config(
            inputs,
            data={"train_files": [], "val_files": [], "extra_keys": ["number"]},
            rollout={"environment": environment, "episode": {"show_tools": False}},
            trainer={"total_steps": 2, "save_freq": 0},
        )
        with training(config, tmp_path / "run", forked=True) as run:
            assert run.finish() == 0, run.output
    assert_sound(run)
    # Each split was asked for once, and is kept in the run's folder.
    assert sorted(line for line in log.read_text().splitlines() if line.startswith("asked for")) == [
        "asked for train",
        "asked for val",
    ]
    rows = {split: owned_rows.owned(str(file)) for split, file in files.items()}
    assert {split: read_jsonl(run.run_dir / f"tasks_{split}.jsonl") for split in files} == rows
    # Each sample belongs to the row that its prompt shows, and the environment graded it.
    steps = sorted((run.run_dir / "trajectories").glob("step_*.parquet"))
    samples = [row for path in steps for row in pyarrow.parquet.read_table(path).to_pylist()]
    assert len(samples) == 2 * NUM_PROMPTS * NUM_SAMPLES
    for sample in samples:
        row = rows["train"][int(json.loads(sample["components"])["environment/row"])]
        assert (sample["prompt"], sample["ground_truth"]) == (
            row["prompt"][0]["content"],
            row["ground_truth"],
        )
    assert len({json.loads(sample["components"])["environment/row"] for sample in samples}) == 2 * NUM_PROMPTS
    # To the bit, but for times and what the engine's batches round; the plain run validates in step 3 only.
    plain = [
        {name: value for name, value in row.items() if not name.startswith("val/drawn/")}
        for row in undisturbed.metrics[:3]
    ]
    further = {name for row in run.metrics for name in row} - {name for row in plain for name in row}
    compared = [{name: row[name] for name in row if name not in further} for row in run.metrics]
    last = {name for name in compared[-1] if name.startswith("val/")}
    compared[-1] = {name: compared[-1][name] for name in compared[-1] if name not in last}
    assert_same_metrics(compared, plain)
    kinds = ("episode/", "val/episode/", "reward/environment", "val/environment")
    assert [name for name in sorted(further) if not is_time(name) and not name.startswith(kinds)] == []
    assert {row["episode/turns/mean"] for row in run.metrics[1:]} == {1.0}
