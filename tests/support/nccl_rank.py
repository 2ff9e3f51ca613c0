"""A learner rank that takes the other one for a rank on another host: `python -m support.nccl_rank HOST`.

Adds up numbers over NCCL, and prints as JSON what came out, where it listens and what was chosen for NCCL.
"""

from __future__ import annotations

import json
import os
import sys

import psutil
import torch

from paceline.learner.distributed.ranks import RankEnvironment, form_group, leave_group, open_store

WAIT_S = 60.0


def main(host: str) -> None:
    """Does the rank's part."""
    environment = RankEnvironment.read()
    environment.use_interface(host)
    device = torch.device("cuda", environment.local_rank)
    ranks = form_group(environment, open_store(environment, WAIT_S), device, WAIT_S)
    total = ranks.world.all_sum(torch.tensor([10.0**environment.rank], device=device)).item()
    listens = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    chosen = {name: os.environ[name] for name in ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY")}
    print("SAID " + json.dumps({"sum": total, "listens": sorted(listens), "chosen": chosen}), flush=True)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
