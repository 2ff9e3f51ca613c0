"""Rollout servers are killed in mid-answer: others go on from what they had saved, and the numbers stay."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from paceline.broker.redis.redis_server import RedisServer
from support.training_run import (
    DEADLINE_S,
    TRANSPORT,
    TrainingRun,
    assert_same_metrics,
    assert_sound,
    only,
    prepare_inputs,
    tiny_config,
    training,
    with_layers,
)

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(1800)]

NUM_STEPS = 5
LEAST_BYTES = 800


def tokens_carried_over(run: TrainingRun) -> list[int]:
    """Of each prompt group that was gone on with, by the servers' logs."""
    logs = [path.read_text(errors="replace") for path in (run.run_dir / "logs").glob("rollout-*.log")]
    return [int(number) for log in logs for number in re.findall(r"goes on from (\d+) tokens", log)]


def admitted(run: TrainingRun) -> list[str]:
    return sorted(e["id"] for e in only(run.events, "trajectory") if e["verdict"] == "admitted")


def half_drawn(client: redis.Redis, server: str) -> int:
    """How many bytes are saved of what a server has under way, in its largest prompt group."""
    sizes = [0]
    for key in client.scan_iter("paceline:*:prompts:v*:rollout:*"):
        stream, group, entry_id = key.decode().rsplit(":", 2)
        pending = client.xpending_range(stream, group, entry_id, entry_id, 1)
        if pending and pending[0]["consumer"].startswith(f"{server}/".encode()):
            sizes.append(client.strlen(key))
    return max(sizes)


def long_answers(folder: Path, **rollout: Any) -> dict[str, Any]:
    """A run of two servers whose answers have up to 900 tokens."""
    inputs = with_layers(prepare_inputs(folder, num_train=64, num_val=1), 1)
    shape = inputs / "model" / "config.json"
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"max_position_embeddings": 1024}))
    return tiny_config(
        inputs,
        data={"train_batch_size": 4, "max_response_length": 900},
        actor={"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 8192},
        rollout={"replicas": 2, "sampler": "batched", **rollout},
        trainer={"total_steps": NUM_STEPS, "save_freq": 0, "val_before_train": False},
        learner={"world_size": 1},
        broker={"lease_s": 1.0},
        service={"max_restarts": 1000, "restart_window_s": 1},
        guard={"throughput": {"warn": None}},
    )


def test_servers_that_are_killed_in_mid_answer_cost_few_tokens_and_change_no_number(tmp_path: Path) -> None:
    config = long_answers(tmp_path, save_progress_s=0.1)
    with training(config, tmp_path / "calm") as calm:
        assert calm.finish() == 0, calm.output
    with (
        RedisServer.start(tmp_path / "redis") as server,
        redis.Redis.from_url(server.url, protocol=2) as client,
        training(config, tmp_path / "killed", f"broker.url={server.url}") as run,
    ):
        for name in ("rollout-0", "rollout-1"):
            run.wait_for(lambda e, of=name: (e.get("member"), e.get("what")) == (of, "state:serving"))
            # Listed before: that takes longer than some answers.
            leader = psutil.Process(run.pid_of(name))
            processes = [leader, *leader.children(recursive=True)]
            run.look()
            deadline = time.monotonic() + DEADLINE_S
            while half_drawn(client, name) < LEAST_BYTES:
                assert time.monotonic() < deadline, "no server had anything half drawn"
                time.sleep(0.002)
            for process in processes:
                process.kill()
        assert run.finish() == 0, run.output
        carried = tokens_carried_over(run)
        print("tokens carried over, by prompt group:", carried)
        assert sum(carried) > LEAST_BYTES // 20
        assert_sound(run)
        assert_same_metrics(run.metrics, calm.metrics, without=TRANSPORT)
        assert admitted(run) == admitted(calm)
        assert list(client.scan_iter("paceline:*")) == []


def test_a_server_that_gets_sigterm_hands_over_half_drawn_samples_at_once(tmp_path: Path) -> None:
    """It saves nothing before."""
    config = long_answers(tmp_path, save_progress_s=0.0)
    with training(config, tmp_path / "run") as run:
        run.wait_for(lambda e: (e.get("member"), e.get("what")) == ("rollout-1", "state:serving"))
        pid = run.pid_of("rollout-1")
        time.sleep(0.3)
        os.kill(pid, signal.SIGTERM)
        assert run.finish() == 0, run.output
        carried = tokens_carried_over(run)
        print("tokens carried over, by prompt group:", carried)
        assert sum(carried) > 0
        assert "is given back half drawn" in (run.run_dir / "logs" / "rollout-1.log").read_text()
        assert_sound(run)
