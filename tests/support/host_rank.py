"""A rank on a host of its own: `python -m support.host_rank NUMBER HOST STORE_HOST STORE_PORT`.

Ranks 0 and 1 are the learner's: they form their group over HOST and add up numbers. Rank 2 is rollout's. All
three form a weight group, and the learner's rows arrive at rank 2. Each prints as JSON what came out, and
where it listens.
"""

from __future__ import annotations

import json
import sys

import psutil
import torch

from paceline.learner.distributed.ranks import RankEnvironment, form_group, leave_group, open_store
from paceline.service.addresses import join, split, to_bind
from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.transport import rendezvous
from paceline.weights.transport.group import WeightGroup
from paceline.weights.transport.place import place_of
from paceline.weights.transport.rendezvous import Deadline

CPU = torch.device("cpu")
WEIGHTS = torch.arange(24, dtype=torch.float32).reshape(6, 4)
WAIT_S = 120.0


def main(number: int, host: str, weights_store: str) -> None:
    """Does the rank's part."""
    said: dict[str, object] = {"node": place_of(CPU).node}
    if number < 2:
        environment = RankEnvironment.read()
        environment.use_interface(host)
        ranks = form_group(environment, open_store(environment, WAIT_S), CPU, WAIT_S)
        said["sum"] = ranks.world.all_sum(torch.tensor([10.0**environment.rank])).item()
    address, port = split(weights_store)
    layouts = [rows(0, 3), rows(3, 6), rows(0, 6)]
    spec = WeightGroupSpec(
        epoch=1,
        backend="gloo",
        store_host=address,
        store_port=port,
        learner_layouts=tuple(layouts[:2]),
        rollout_layouts=tuple(layouts[2:]),
        wire_dtype="float32",
        timeout_s=WAIT_S,
    )
    store = rendezvous.open_store(to_bind(address), WAIT_S, port=port) if number == 0 else None
    group = WeightGroup.form(
        spec, rank=number, layout=layouts[number], device=CPU, timeout_s=WAIT_S, store=store
    )
    said["listens"] = sorted({c.laddr.ip for c in connections() if c.status == psutil.CONN_LISTEN})
    if number < 2:
        box = layouts[number].slices[0].box
        group.send({"w": WEIGHTS[box.slices].clone()}, Deadline("push", WAIT_S))
        group.sum_at_first(torch.tensor([1]), Deadline("digests", WAIT_S))
        leave_group()
    else:
        received = torch.zeros_like(WEIGHTS)
        copies = group.copies({"w": received})
        for number in group.receive(Deadline("push", WAIT_S)):
            copies[number].run()
        said["arrived"] = torch.equal(received, WEIGHTS)
    print(json.dumps(said))


def rows(first: int, last: int) -> RankLayout:
    """The layout of a rank with these rows of the one tensor."""
    box = Box((first, 0), (last, 4))
    part = TensorSlice(name="w", global_shape=(6, 4), box=box, param="w", offset=(0, 0))
    return RankLayout(dtype="float32", slices=(part,))


def connections() -> list[psutil._common.sconn]:
    """The TCP sockets of this process."""
    return psutil.Process().net_connections(kind="tcp")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], join(sys.argv[3], int(sys.argv[4])))
