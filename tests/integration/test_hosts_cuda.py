"""NCCL between learner ranks that take each other for ranks on other hosts: the interface of `--host`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from paceline.sizing.machine import free_port

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(900)]

TESTS = Path(__file__).parents[1]
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


def beyond_loopback(family: int) -> tuple[str, str]:
    """Name and address of the first interface with an address of the family; skips without one."""
    for name, entries in sorted(psutil.net_if_addrs().items()):
        for entry in entries:
            usable = entry.family == FAMILIES[family] and "%" not in entry.address
            if usable and entry.address not in ("127.0.0.1", "::1"):
                return name, entry.address
    pytest.skip(f"no interface has an IPv{family} address but loopback: ip address add ... gives it one")


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs; deploy/test_hosts.py is its CPU twin"
)
@pytest.mark.parametrize("family", [4, 6])
def test_nccl_takes_the_interface_of_the_host(family: int) -> None:
    """With names of their own, the ranks talk over sockets, as between hosts."""
    name, address = beyond_loopback(family)
    port = free_port()
    processes = []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 1}
        place |= {"MASTER_ADDR": address, "MASTER_PORT": port, "NCCL_HOSTID": f"host-{rank}"}
        place |= {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": 1}
        place |= {"PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "support.nccl_rank", address],
                env=os.environ | {key: str(value) for key, value in place.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in processes:
        output = process.communicate(timeout=90)[0]
        assert process.returncode == 0, output[-3000:]
        said = json.loads(re.findall(r"^SAID (.*)$", output, re.MULTILINE)[-1])
        assert said["sum"] == 11.0
        assert said["chosen"]["NCCL_SOCKET_IFNAME"] == f"={name}"
        # NCCL's service for questions about its state (RAS) is on loopback.
        own = {entry.address for entry in psutil.net_if_addrs()[name]}
        assert set(said["listens"]) <= own | {"127.0.0.1", "::1"}
        over = re.findall(r"NET/Socket ?: Using (.*)", output)
        assert over
        assert all(f"{name}:{address}" in line for line in over), over
