"""Runs over several hosts: namespaces with their own addresses and folders, and no shared disk; over TLS."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.hosts import Network, need_namespaces, network
from support.hosts_run import MASTER_PORT, HostsRun, Up
from support.redis_servers import need_redis_with_tls
from support.training_run import (
    TRANSPORT,
    Row,
    assert_same_metrics,
    only,
    prepare_inputs,
    tiny_config,
    training,
    with_layers,
)

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.torch,
    pytest.mark.redis,
    pytest.mark.timeout(1800),
]

CUT_S = 20.0
LOOPBACK = ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]")


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    """Skips before the undisturbed run is made."""
    need_namespaces()
    need_redis_with_tls()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path / "hosts", ["a", "b"]) as made:
        yield made


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path / "hosts", ["a", "b", "c"]) as made:
        yield made


def test_three_hosts_and_two_cuts_train_what_the_local_run_trains(
    three: Network, small_inputs: Path, small_run: dict[str, Any], undisturbed: list[Row]
) -> None:
    """Learner ranks on a and b by torchrun, rollout on c, the rest on a.

    c is cut off in the second step: it registers again. b is cut off in the third: the ranks end, torchrun
    starts them again, and the run goes on from the newest checkpoint.
    """
    run = HostsRun(three, small_inputs, small_run)
    run.serve_storage()
    run.start_controller()
    run.start_torchrun(three["a"], three["b"])
    run.start_member("reward", three["a"])
    run.start_member("rollout", three["c"])
    run.wait_for_phase("collect", 2)
    for host in three.hosts.values():
        # Each on its host's address or on loopback; every interface is torchrun's agent alone.
        listeners = set(re.findall(r"LISTEN\s+\d+\s+\d+\s+(\S+):(\d+)", host.run("ss", "-Hltn")))
        own = (host.address, f"[::ffff:{host.address}]", *LOOPBACK)  # gRPC listens for both families
        beyond = {place for place in listeners if place[0] not in own}
        assert beyond <= {("*", str(MASTER_PORT))}, host.name
    three.cut("c", seconds=CUT_S)
    run.wait_for_phase("collect", 3)
    three.cut("b", seconds=CUT_S)
    run.finish(500)
    assert run.registrations("rollout-c") == 2
    assert run.registrations("learner-0") >= 2
    assert "learner rank 1 has been silent for 10 s" in run.log_of("learner-0")
    assert_same_metrics(run.metrics, undisturbed, without=TRANSPORT)
    run.assert_sound()
    # Nobody has the folders of another.
    assert not (three["b"].folder / "run").exists()
    assert not (three["c"].folder / "run").exists()


def test_one_command_runs_two_hosts_and_goes_on_after_a_stop(
    two: Network, small_inputs: Path, small_run: dict[str, Any], undisturbed: list[Row]
) -> None:
    """Stopped in the third step; the same command goes on from the checkpoint in the object store."""
    run = HostsRun(two, small_inputs, small_run)
    run.serve_storage()
    up = Up(run)
    first = up.start("controller")
    run.wait_for_phase("collect", 3)
    # The rollout server is on the second host, of which nobody else knows the folder.
    assert "paceline.rollout" in " ".join(up.left())
    assert not (two["b"].folder / "run").exists()
    first.terminate()
    assert first.wait(300) == 128 + signal.SIGTERM, run.logs()
    assert up.left() == []
    second = up.start("controller")
    assert second.wait(500) == 0, run.logs()
    assert "goes on" in run.log_of("controller")
    assert up.left() == []
    assert_same_metrics(run.metrics, undisturbed, without=TRANSPORT)
    run.assert_sound()
    assert not (two["a"].folder / "run/checkpoints").exists()


def test_a_host_validates_while_the_other_trains_and_may_be_cut_off_meanwhile(
    two: Network, tmp_path: Path
) -> None:
    inputs = with_layers(prepare_inputs(tmp_path, num_train=64, num_val=24), 1)
    sections: dict[str, Any] = {
        "data": {"train_batch_size": 4, "max_response_length": 8},
        "actor": {"ppo_mini_batch_size": 2},
        "rollout": {"n": 2, "max_groups_in_flight": 2, "val": {"n": 2, "temperature": 1.0}},
        "learner": {"world_size": 1},
        "trainer": {"total_steps": 6, "test_freq": 3, "save_freq": 0},
        # A host that is cut off is not dead.
        "service": {"suspect_after_s": 100, "dead_after_s": 200},
        "guard": {"throughput": {"warn": None}},
    }
    with training(tiny_config(inputs, **sections), tmp_path / "alone", forked=True) as alone:
        assert alone.finish() == 0, alone.output
    sections["rollout"] |= {"replicas": 2, "validation_servers": 1}
    run = HostsRun(two, inputs, sections)
    run.serve_storage()
    up = Up(run, {"a": {"learner": 1, "reward": 1, "rollout": 1}, "b": {"rollout": 1}})
    process = up.start("controller")
    run.wait_for_phase("collect", 4)  # the validation of step 3 has begun
    two.cut("b", seconds=CUT_S)
    assert process.wait(500) == 0, run.logs()
    assert up.left() == []
    run.assert_sound()
    beside = [event for event in only(run.events, "trajectory") if event.get("beside") == 3]
    assert {event["server"] for event in beside} == {"rollout-1"}
    order = [
        (event["event"], event["step"]) for event in run.events if event["event"] in ("step", "validated")
    ]
    assert order.index(("validated", 3)) > order.index(("step", 4))
    for part in ("val/", "critic/score/", "reward/std"):
        values = [
            {
                (line["step"], name): value
                for line in lines
                for name, value in line.items()
                if name.startswith(part)
            }
            for lines in (run.metrics, alone.metrics)
        ]
        assert values[0]
        assert values[0] == values[1], part
