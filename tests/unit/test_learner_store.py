"""Where the learner's ranks meet: what a lost group left in torchrun's store is not seen by the next one."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from paceline.learner.distributed.ranks import RankEnvironment, open_store

pytestmark = pytest.mark.torch


def test_ranks_that_torchrun_starts_again_do_not_find_the_keys_of_the_lost_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They took the settings, beats and last words of the lost group for their own."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stores = []
    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        for rank in range(2):
            environment = RankEnvironment(
                rank=rank,
                world_size=2,
                local_rank=rank,
                num_local_ranks=2,
                master_host="127.0.0.1",
                master_port=agent.port,
            )
            stores.append(open_store(environment, 5.0))
    stores[0].set("key", "of the first group")
    assert [store.check(["key"]) for store in stores] == [True, True, False, False]
    # The heartbeats have a connection of their own.
    assert stores[1].clone().get("key") == b"of the first group"  # type: ignore[attr-defined]
