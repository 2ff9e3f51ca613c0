"""The reference model in host memory: the same numbers, and nothing on the device except while it scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.learner.checkpoint.load import load
from paceline.learner.distributed.host_memory import local_part
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.train.host_reference import HostReference
from paceline.learner.train.learner import Learner
from support.learner_fakes import run_config
from support.learner_scenarios import save, train

OFFLOADED = {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 128, "optim": {"lr": 1e-2}}
OFFLOADED |= {"memory": {"offload_reference": True}}
PLAIN = OFFLOADED | {"memory": {}}


def num_bytes(network: nn.Module | None) -> int:
    """What the parameters of a network take on its device."""
    assert network is not None
    return sum(local_part(parameter).untyped_storage().nbytes() for parameter in network.parameters())


def test_metrics_are_equal_to_the_bit(model: Path, ranks: Ranks) -> None:
    plain, offloaded = (Learner.build(run_config(model, actor=actor), ranks) for actor in (PLAIN, OFFLOADED))
    assert plain.host_reference is None
    expected = train(plain, 1, 3)
    assert abs(expected[-1]["algorithm/reference_kl"]) > 1e-4
    assert train(offloaded, 1, 3) == expected


def test_the_shards_are_on_the_device_while_the_reference_scores_and_at_no_other_time(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Learner.build(run_config(model, actor=PLAIN), ranks)
    learner = Learner.build(run_config(model, actor=OFFLOADED), ranks)
    size = num_bytes(plain.reference)
    seen: list[int] = []
    present = HostReference.present

    @contextmanager
    def watched(reference: HostReference) -> Iterator[None]:
        seen.append(num_bytes(learner.reference))
        with present(reference):
            seen.append(num_bytes(learner.reference))
            yield
        seen.append(num_bytes(learner.reference))

    monkeypatch.setattr(HostReference, "present", watched)
    train(learner, 1, 2)
    assert seen == [0, size, 0] * 2
    assert num_bytes(learner.actor.network) == size


def test_what_a_block_that_fails_copied_in_is_given_up(model: Path, ranks: Ranks) -> None:
    learner = Learner.build(run_config(model, actor=OFFLOADED), ranks)
    with pytest.raises(ValueError, match="in the block"), learner.reference_present():
        raise ValueError("in the block")
    assert num_bytes(learner.reference) == 0
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
    host = HostReference(network)
    with host.present():
        assert torch.equal(network[1].weight, values)
    assert network[0].weight.untyped_storage().nbytes() == 0
