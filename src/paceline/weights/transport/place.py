"""Finds out on which machine and GPU this process runs."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

import torch

from paceline.weights.geometry.layout import RankPlace

_NODE_ID = "PACELINE_NODE_ID"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def place_of(device: torch.device) -> RankPlace:
    """Returns the place of a rank whose parameters are on `device`."""
    return RankPlace(node=_node(), gpu=_gpu(device) if device.type == "cuda" else "")


@cache
def _node() -> str:
    """Returns PACELINE_NODE_ID, else the kernel's boot id, which all containers of a machine share."""
    given = os.environ.get(_NODE_ID)
    if given:
        return given
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _gpu(device: torch.device) -> str:
    """Returns the GPU's unique id; its index differs between containers and machines."""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return str(uuid)
    bus = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return ":".join([_node(), *(f"{number:x}" for number in bus)])
