"""Frozen networks: their log-probs by name, in host memory or not, beside each other and over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from paceline.core.errors import ConfigError
from paceline.learner import group
from paceline.learner.checkpoint.load import load
from paceline.learner.checkpoint.manifest import Manifest
from paceline.learner.distributed.host_memory import local_part
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.state.frozen import HostShards
from paceline.learner.train.state.learner import Learner
from support.frozen_networks import (
    OWN,
    log_probs_alone,
    scored_log_probs,
    with_teacher,
    write_own,
    write_teacher,
)
from support.learner_fakes import run_config
from support.learner_ranks import run_ranks
from support.learner_scenarios import numbers, save, take_step, train

OFFLOADED = {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 128, "optim": {"lr": 1e-2}}
OFFLOADED |= {"memory": {"offload_reference": True}}
PLAIN = OFFLOADED | {"memory": {}}


def num_bytes(network: nn.Module | None) -> int:
    """What the parameters of a network take on its device."""
    assert network is not None
    return sum(local_part(parameter).untyped_storage().nbytes() for parameter in network.parameters())


def test_metrics_are_equal_to_the_bit(model: Path, ranks: Ranks) -> None:
    plain, offloaded = (Learner.build(run_config(model, actor=actor), ranks) for actor in (PLAIN, OFFLOADED))
    expected = train(plain, 1, 3)
    assert abs(expected[-1]["algorithm/reference_kl"]) > 1e-4
    assert train(offloaded, 1, 3) == expected


def test_the_shards_are_on_the_device_while_the_reference_scores_and_at_no_other_time(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Learner.build(run_config(model, actor=PLAIN), ranks)
    learner = Learner.build(run_config(model, actor=OFFLOADED), ranks)
    size = num_bytes(plain.frozen["reference"].network)
    seen: list[int] = []
    present = HostShards.present

    @contextmanager
    def watched(shards: HostShards) -> Iterator[None]:
        seen.append(num_bytes(learner.frozen["reference"].network))
        with present(shards):
            seen.append(num_bytes(learner.frozen["reference"].network))
            yield
        seen.append(num_bytes(learner.frozen["reference"].network))

    monkeypatch.setattr(HostShards, "present", watched)
    train(learner, 1, 2)
    assert seen == [0, size, 0] * 2
    assert num_bytes(learner.actor.network) == size


def test_what_a_block_that_fails_copied_in_is_given_up(model: Path, ranks: Ranks) -> None:
    learner = Learner.build(run_config(model, actor=OFFLOADED), ranks)
    with pytest.raises(ValueError, match="in the block"), learner.frozen["reference"].present():
        raise ValueError("in the block")
    assert num_bytes(learner.frozen["reference"].network) == 0
    plain = Learner.build(run_config(model, actor=PLAIN), ranks)
    assert train(learner, 1, 1) == train(plain, 1, 1)


def test_a_checkpoint_of_such_a_run_goes_on_with_and_without(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    learner = Learner.build(run_config(model, actor=OFFLOADED), ranks)
    train(learner, 1, 1)
    save(learner, tmp_path / "step_000001", step=1)
    expected = train(learner, 2, 2)
    for actor in (PLAIN, OFFLOADED):
        resumed = Learner.build(run_config(model, actor=actor), ranks)
        load(resumed, tmp_path / "step_000001")
        assert train(resumed, 2, 2) == expected


def test_tied_weights_are_kept_once() -> None:
    network = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    network[1].weight = network[0].weight
    values = network[0].weight.detach().clone()
    host = HostShards(network)
    with host.present():
        assert torch.equal(network[1].weight, values)
    assert network[0].weight.untyped_storage().nbytes() == 0


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_own(tmp_path_factory.mktemp("own"))


def close(got: list[list[float]], wanted: list[list[float]]) -> None:
    assert len(got) == len(wanted) == 32
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("architecture", "temperature"), [("qwen2", 1.0), ("gemma2", 0.7)])
def test_a_teachers_log_probs_are_those_of_the_model_alone(
    model: Path, own: str, ranks: Ranks, tmp_path: Path, architecture: str, temperature: float
) -> None:
    """The teacher is wider and deeper than the policy, and its vocabulary is padded to more tokens.

    That of another architecture has sliding windows and softcaps, which the policy does not have.
    """
    teacher = write_teacher(tmp_path, architecture=architecture)
    learner = Learner.build(with_teacher(model, teacher, own, temperature=temperature), ranks)
    scored = scored_log_probs(learner)
    assert scored.keys() == {"rollout", "old", "reference", "teacher"}
    close(scored["teacher"], log_probs_alone(teacher, temperature))
    close(scored["reference"], log_probs_alone(model, temperature))


@pytest.mark.timeout(900)
def test_two_ranks_and_host_memory_change_nothing(model: Path, teacher: Path, own: str, ranks: Ranks) -> None:
    """A step of policy, reference and teacher on two ranks."""
    first, second = run_ranks("support.frozen_networks:on_ranks", 2, str(model), str(teacher), own)
    (plain, its_rows), (offloaded, offloaded_rows) = first
    (_, other_rows), _ = second
    assert offloaded == plain
    assert offloaded_rows == its_rows
    rows = {int(row): table for row, table in {**its_rows, **other_rows}.items()}
    close([rows[row] for row in range(32)], log_probs_alone(teacher, 1.0))
    alone = numbers(take_step(Learner.build(with_teacher(model, teacher, own), ranks), 1))
    assert plain == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_host_memory_holds_all_but_the_network_that_scores(
    model: Path, teacher: Path, own: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, offloaded = (
        Learner.build(with_teacher(model, teacher, own, memory=memory), ranks)
        for memory in ({}, {"offload_reference": True})
    )
    sizes = [num_bytes(frozen.network) for frozen in plain.frozen.values()]
    seen: list[list[int]] = []
    present = HostShards.present

    @contextmanager
    def watched(shards: HostShards) -> Iterator[None]:
        with present(shards):
            seen.append([num_bytes(frozen.network) for frozen in offloaded.frozen.values()])
            yield

    monkeypatch.setattr(HostShards, "present", watched)
    assert train(offloaded, 1, 2) == train(plain, 1, 2)
    assert seen == [[sizes[0], 0], [0, sizes[1]]] * 2


def test_a_teacher_beside_adapters_and_the_reference_that_is_the_policy(
    model: Path, teacher: Path, own: str, ranks: Ranks
) -> None:
    config = with_teacher(model, teacher, own, lora={"rank": 4}, memory={"offload_reference": True})
    learner = Learner.build(config, ranks)
    assert learner.frozen["reference"].network is learner.actor.network
    before = scored_log_probs(learner)
    train(learner, 1, 2)
    after = scored_log_probs(learner)
    assert after["old"] != before["old"]
    assert after["reference"] == before["reference"]
    assert after["teacher"] == before["teacher"]
    close(after["teacher"], log_probs_alone(teacher, 1.0))


def test_halved_micro_batches_keep_their_teachers_rows(
    model: Path, teacher: Path, own: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss reads the teacher, so rows of others would be another gradient."""
    from paceline.learner.train.updating.losses import PolicyLoss

    config = with_teacher(model, teacher, own, policy_loss={"type": "custom", "path": f"{own}:towards"})
    plain = numbers(take_step(Learner.build(config, ranks), 1))
    assert plain["actor/gap"] > 0.1
    honest, calls = PolicyLoss.__call__, iter(range(100))

    def short_of_memory(self: PolicyLoss, *arguments: Any) -> Any:
        result = honest(self, *arguments)
        if next(calls) == 0:
            raise torch.OutOfMemoryError("made up")
        return result

    monkeypatch.setattr(PolicyLoss, "__call__", short_of_memory)
    metrics = numbers(take_step(Learner.build(config, ranks, lambda note: None), 1))
    assert metrics.pop("guard/out_of_memory") == 1
    assert metrics == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_a_checkpoint_names_the_networks_and_a_resume_with_others_tells(
    model: Path, teacher: Path, own: str, ranks: Ranks, tmp_path: Path
) -> None:
    config = with_teacher(model, teacher, own)
    learner = Learner.build(config, ranks)
    train(learner, 1, 1)
    save(learner, tmp_path / "step_000001", step=1)
    digests = Manifest.read(tmp_path / "step_000001").frozen
    assert digests is not None
    assert digests.keys() == {"reference", "teacher"}
    assert len(set(digests.values())) == 2
    expected = train(learner, 2, 2)
    notes: list[str] = []
    resumed = Learner.build(config, ranks)
    load(resumed, tmp_path / "step_000001", notify=notes.append)
    assert notes == []
    assert train(resumed, 2, 2) == expected
    other = write_teacher(tmp_path / "other", seed=9)
    changed = Learner.build(with_teacher(model, other, own, coach=model, use_kl_loss=False), ranks)
    load(changed, tmp_path / "step_000001", notify=notes.append)
    told = [note.removeprefix("the frozen network ").split("; if this is not meant, set ") for note in notes]
    assert told == [
        ["coach is new: the run was trained without it up to step 1", "algorithm.networks back"],
        [
            "reference is gone: the run was trained with it up to step 1",
            "actor.use_kl_loss and algorithm.use_kl_in_reward back",
        ],
        [
            f"teacher has other weights in {other} than up to step 1",
            "algorithm.networks.teacher.path or its files back",
        ],
    ]
    assert changed.version == 1


@pytest.mark.parametrize(
    ("kind", "algorithm", "said"),
    [
        ("Distil", {}, r"reads the network teacher, .*; write algorithm.networks: \{teacher: FOLDER\}"),
        ("NeedsReference", {}, r"reads the network reference, .*; write actor.use_kl_loss: true"),
    ],
)
def test_an_algorithm_whose_network_is_missing_is_told_the_line_to_write(
    own: str, kind: str, algorithm: dict[str, Any], said: str
) -> None:
    from paceline.learner.train.algorithm import try_algorithm

    config = run_config(Path("m"), algorithm={**OWN, "type": "custom", "path": f"{own}:{kind}", **algorithm})
    with pytest.raises(ConfigError, match=said):
        try_algorithm(config)


def test_the_trial_gives_own_code_the_networks_names(own: str) -> None:
    from paceline.learner.train.algorithm import try_algorithm

    for algorithm in (
        {"type": "custom", "path": f"{own}:Distil"},
        {"adv_estimator": f"{own}:gap"},
    ):
        try_algorithm(run_config(Path("m"), algorithm={**OWN, **algorithm, "networks": {"teacher": "t"}}))
    loss = {"type": "custom", "path": f"{own}:towards"}
    try_algorithm(
        run_config(Path("m"), algorithm={**OWN, "networks": {"teacher": "t"}}, actor={"policy_loss": loss})
    )
    with pytest.raises(ConfigError, match=r"KeyError: 'teacher'.*inputs.log_probs_of has old, rollout; alg"):
        try_algorithm(run_config(Path("m"), algorithm=OWN, actor={"policy_loss": loss}))


def test_a_rank_takes_the_networks_from_folders_of_its_host(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "local_folder", lambda place, model: f"copy of {place}")
    config = with_teacher(model, "s3://models/teacher", "my.py")
    fields = ("broker_url", "checkpoint_root", "checkpoint_marker", "run_dir", "host", "advertise")
    given = group.RankRegistration(config=config, checkpoints=(), **dict.fromkeys(fields, ""))
    local = group._localise(given, ranks, HashStore(), None).config
    assert local.algorithm.networks["teacher"].path == "copy of s3://models/teacher"
    assert local.model.path == str(model)
