"""What weights travel over: decided by the GPUs that ranks are on, not by their indices."""

from __future__ import annotations

import pytest
import torch

from paceline.weights.geometry.layout import RankLayout, RankPlace
from paceline.weights.plan.backend import choose_backend
from paceline.weights.transport import place


def ranks(*gpus: str) -> list[RankLayout]:
    return [RankLayout(dtype="float32", slices=(), place=RankPlace(node="n", gpu=gpu)) for gpu in gpus]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (("", ""), "gloo"),
        (("GPU-a", ""), "gloo"),
        (("GPU-a", "GPU-b"), "nccl"),
        (("GPU-a", "GPU-b", "GPU-c", "GPU-d"), "nccl"),
        (("GPU-a", "GPU-a"), "gloo"),
        (("GPU-a", "GPU-b", "GPU-b"), "gloo"),
    ],
)
def test_auto(gpus: tuple[str, ...], expected: str) -> None:
    assert choose_backend("auto", ranks(*gpus)) == expected


def test_a_backend_that_is_named_stays() -> None:
    assert choose_backend("nccl", ranks("GPU-a", "GPU-a")) == "nccl"
    assert choose_backend("gloo", ranks("GPU-a", "GPU-b")) == "gloo"


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
    assert choose_backend("auto", ranks(*(p.gpu for p in places))) == "nccl"


def test_a_node_is_the_machine_unless_the_user_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_node", place._node.__wrapped__)
    monkeypatch.delenv("PACELINE_NODE_ID", raising=False)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    assert place.place_of(torch.device("cpu")) == RankPlace(node=boot_id)
    monkeypatch.setenv("PACELINE_NODE_ID", "rack7-host3")
    assert place.place_of(torch.device("cpu")) == RankPlace(node="rack7-host3")
