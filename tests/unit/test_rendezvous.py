"""Where the stores of learner ranks and weight groups listen, and what the roll call asks of them."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import psutil
import pytest

from paceline.core.errors import ConfigError, DeadlineError, EnvironmentLackError
from paceline.core.members import MemberKind, RankRef
from paceline.learner.distributed.ranks import RankEnvironment
from paceline.learner.distributed.ranks import open_store as open_ranks_store
from paceline.weights.geometry.layout import RankLayout
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.transport.rendezvous import (
    Deadline,
    await_all,
    connect_store,
    make_process_group,
    open_store,
)

if TYPE_CHECKING:
    from torch.distributed import Store

pytestmark = pytest.mark.torch
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def listening_on(port: int) -> set[str]:
    """The addresses at which this process listens on a port."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(host: str, port: int, *, rank: int = 0) -> RankEnvironment:
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": host, "MASTER_PORT": port}
    return RankEnvironment.read({name: str(value) for name, value in given.items()})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_weight_groups_store_listens_on_its_address_alone(host: str) -> None:
    store = open_store(host, 5.0)
    assert listening_on(store.port) == {host}
    spec = group_of(2, host=host, port=store.port)
    connect_store(spec, Deadline("join", 60.0)).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_ranks_store_listens_on_the_masters_address_alone(host: str) -> None:
    port = free_port()
    store = open_ranks_store(environment(host, port), 60.0)
    assert listening_on(port) == {host.strip("[]")}
    open_ranks_store(environment(host, port, rank=1), 60.0).set("key", "value")
    assert store.get("key") == b"value"


def test_a_master_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentLackError, match=r"cannot listen on 192\.0\.2\.77:4711.*MASTER_ADDR"):
        open_ranks_store(environment("192.0.2.77", 4711), 5.0)


def test_ranks_on_several_hosts_need_an_address_that_the_others_reach() -> None:
    here = environment("127.0.0.1", 1)
    assert here.num_local_ranks == 2
    spread = RankEnvironment.read(
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
        | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    )
    with pytest.raises(ConfigError, match="4 of the learner's 8 ranks are on other hosts.*--host"):
        spread.use_interface("127.0.0.1")


class CountingStore:
    """A store that counts what each thread asks of it."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._lock = threading.Lock()
        self.num_requests: Counter[int] = Counter()

    def set(self, key: str, value: str) -> None:
        self.num_requests[threading.get_ident()] += 1
        self._values[key] = int(value)

    def add(self, key: str, amount: int) -> int:
        self.num_requests[threading.get_ident()] += 1
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self.num_requests[threading.get_ident()] += 1
        return all(key in self._values for key in keys)


def group_of(world_size: int, *, host: str = "127.0.0.1", port: int = 1, epoch: int = 1) -> WeightGroupSpec:
    layout = RankLayout(dtype="float32", slices=())
    return WeightGroupSpec(
        epoch=epoch,
        backend="gloo",
        store_host=host,
        store_port=port,
        learner_layouts=(layout,),
        rollout_layouts=(layout,) * (world_size - 1),
        wire_dtype="float32",
    )


def requests_per_look(world_size: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The most that a rank asks of the store in a look, while half of them are 0.3 s late."""
    spec, store, came = group_of(world_size), CountingStore(), []
    looks: Counter[int] = Counter()

    def sleep(seconds: float) -> None:
        looks[threading.get_ident()] += 1
        time.sleep(seconds)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr("paceline.weights.transport.rendezvous.time", clock)
    monkeypatch.setattr("paceline.weights.transport.rendezvous.PrefixStore", lambda _, store: store)

    def come(rank: int) -> None:
        await_all(spec, rank, cast("Store", store), Deadline("join", 60.0))
        came.append(rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(1, world_size)]
    for number, thread in enumerate(threads):
        if number == world_size // 2:
            time.sleep(0.3)
        thread.start()
    assert came == []
    come(0)
    for thread in threads:
        thread.join(60)
    assert sorted(came) == list(range(world_size))
    return max(number / (looks[thread] + 1) for thread, number in store.num_requests.items())


def test_the_roll_call_of_many_ranks_asks_as_often_as_that_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for every rank's key in every look: world^2 requests each time."""
    assert requests_per_look(32, monkeypatch) < 2 * requests_per_look(4, monkeypatch)


def test_the_roll_call_names_the_first_rank_that_does_not_come() -> None:
    store = open_store("127.0.0.1", 60.0)
    spec = group_of(4, port=store.port)
    ended: list[DeadlineError] = []

    def come(rank: int) -> None:
        with pytest.raises(DeadlineError) as caught:
            await_all(spec, rank, store.clone(), Deadline("join", 3.0))
        ended.append(caught.value)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [error.peer for error in ended] == [RankRef(MemberKind.ROLLOUT, 1)] * 3


@pytest.mark.parametrize("before", [None, "0"])
def test_a_weight_group_over_nccl_has_no_watchdog_and_other_groups_keep_theirs(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recording:
        """Stands for torch's group, which reads the environment when it is made."""

        class Options:
            pass

        def __init__(self, *_: object) -> None:
            self.blocking_wait = os.environ.get(BLOCKING_WAIT)

    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Recording, raising=False)
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    store = open_store("127.0.0.1", 60.0)
    spec = dataclasses.replace(group_of(2, host="127.0.0.1", port=store.port), backend="nccl")
    group = make_process_group(spec, 0, connect_store(spec, Deadline("join", 60.0)), Deadline("join", 60.0))
    assert group.blocking_wait == "1"
    assert os.environ.get(BLOCKING_WAIT) == before
