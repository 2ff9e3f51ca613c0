"""What weights travel over: decided by the GPUs that ranks are on, not by their indices."""

from __future__ import annotations

import pytest
import torch

from paceline.weights.geometry.layout import RankLayout, RankPlace
from paceline.weights.plan.backend import Wire, choose_wire, stand_ins
from paceline.weights.transport import place


def ranks(*gpus: str) -> list[RankLayout]:
    return [RankLayout(dtype="float32", slices=(), place=RankPlace(node="n", gpu=gpu)) for gpu in gpus]


@pytest.mark.parametrize(
    ("learners", "rollouts", "auto", "shared"),
    [
        ([""], [""], "gloo", "gloo"),
        (["GPU-a"], [""], "gloo", "gloo"),
        (["GPU-a"], ["GPU-b"], "nccl", "nccl"),
        (["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"], "nccl", "nccl"),
        (["GPU-a"], ["GPU-a"], "gloo", "nccl"),
        (["GPU-a"], ["GPU-b", "GPU-b"], "gloo", "gloo"),
        (["GPU-a", "GPU-b"], ["GPU-b", "GPU-a"], "gloo", "nccl"),
        (["GPU-a", "GPU-b"], ["GPU-b", "GPU-c"], "gloo", "nccl"),
        (["GPU-a", "GPU-a"], ["GPU-a"], "gloo", "gloo"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank_that_exchanges_messages(
    learners: list[str], rollouts: list[str], auto: str, shared: str
) -> None:
    assert choose_wire("auto", ranks(*learners), ranks(*rollouts)) == Wire(auto, shared=False)
    on_one_kind = shared == "nccl" or not any((*learners, *rollouts))
    assert choose_wire("shared", ranks(*learners), ranks(*rollouts)) == Wire(shared, shared=on_one_kind)


def test_a_backend_that_is_named_stays() -> None:
    assert choose_wire("nccl", ranks("GPU-a"), ranks("GPU-a")) == Wire("nccl", shared=False)
    assert choose_wire("gloo", ranks("GPU-a"), ranks("GPU-b")) == Wire("gloo", shared=False)


def test_a_learner_rank_stands_in_for_the_rollout_ranks_at_its_place() -> None:
    a, b, c = (RankPlace(node="n", gpu=gpu) for gpu in "abc")
    assert stand_ins([a, b], [b, a, b, c]) == {0: 1, 1: 0, 2: 1}
    cpu, elsewhere = RankPlace(node="n"), RankPlace(node="m")
    assert stand_ins([cpu, cpu], [cpu, cpu, cpu, elsewhere]) == {0: 0, 1: 1, 2: 0}


class Properties:
    """What torch says of a GPU."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


def test_the_same_index_on_two_hosts_is_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learner [0, 1] on one host and rollout [0, 1] on another got gloo."""
    places = []
    for host in ("a", "b"):
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device, host=host: Properties(f"GPU-{host}-{device.index}"),
        )
        places += [place.place_of(torch.device("cuda", index)) for index in (0, 1)]
    gpus = [place.gpu for place in places]
    assert choose_wire("auto", ranks(*gpus[:2]), ranks(*gpus[2:])).backend == "nccl"


def test_a_node_is_the_machine_unless_the_user_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_node", place._node.__wrapped__)
    monkeypatch.delenv("PACELINE_NODE_ID", raising=False)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    assert place.place_of(torch.device("cpu")) == RankPlace(node=boot_id)
    monkeypatch.setenv("PACELINE_NODE_ID", "rack7-host3")
    assert place.place_of(torch.device("cpu")) == RankPlace(node="rack7-host3")
