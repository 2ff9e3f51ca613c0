"""Measures weight pushes from FSDP2 ranks to vLLM engines, against the links' limit and a broadcast.

    python benchmarks/weights.py --shapes 0.5B,7B --learners 4 --engines 1x4,2x2,4x1          # 8 GPUs
    python benchmarks/weights.py --shapes 0.5B,7B --learners 2 --engines 1x2,2x1 --at-once    # 4 GPUs
    python benchmarks/weights.py --shapes 7B --learners 1 --engines 3x1                    # 4 GPUs, relaying
    python benchmarks/weights.py --shapes tiny --learners 2 --engines 2x1 --device cpu          # anywhere

`--engines 2x1` means two engines of tensor-parallel size 1. Learner ranks take the first GPUs, engines the
next. The weights are random and change before every push; digests of all ranks are compared after every push.
If `weights.relay: auto` would relay weights between rollout ranks, there is a row with and a row without
relaying.

Columns, medians in milliseconds:
  transfer        from the learners' first cast until the last receiver has scattered everything; receivers
                  already wait when the learners begin
  pause           from the calls to both sides until digests agree and prefix caches are reset
  digest          time of the digest on the slowest rank of each side
  join            forming the group, and forming it again
  first           the first transfer after each of the two joins
  plain           the links' limit: the same bytes per pair as one message in one grouped call, nothing else
  out GB l/r      bytes that the busiest learner rank and the busiest rollout rank send
  usual           the usual way: all learner ranks gather every full tensor in the wire's type, rank 0 packs
                  them into 1 GiB buffers and broadcasts them to all rollout ranks, which load them with the
                  engine's own loader; without digests, until the last rank has loaded

`--trace FOLDER` writes a trace of one push of each row, one file per rank, for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import records
import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES
from weights_fleet import HEAD_START_S, Fleet
from weights_sides import Case

from paceline.service.observability.gpu_metrics import visible_gpus


def measure(
    fleet: Fleet, round_bytes: int, relay: str, repeats: int, *, usual: bool
) -> dict[str, float] | None:
    """Measures one case; returns None if `auto` would relay nothing."""
    plan = fleet.describe(round_bytes, relay)
    if relay == "auto" and plan.num_channels == 1:
        return None
    join_ms = fleet.form()
    fleet.all("memory", "paceline_memory", True)
    version, transfers, pauses, parts = 0, list[float](), list[float](), list[list[float]]()
    digests_l, digests_r = list[float](), list[float]()
    for version in range(repeats + 1):
        transfer, _, sent, received = fleet.push(version, HEAD_START_S)
        transfers.append(transfer)
        digests_l.append(max(answer["receipt"].digest_ms for answer in sent))
        digests_r.append(max(answer["receipt"].digest_ms for answer in received))
    for again in range(repeats):
        _, pause, _, received = fleet.push(version + 1 + again, 0.0)
        pauses.append(pause)
        slowest = [max(answer[key] for answer in received) for key in ("call_ms", "reset_ms")]
        parts.append([*slowest, fleet.compare_ms])
    grown = [rank["peak"] - rank["now"] for rank in fleet.all("memory", "paceline_memory", True)[0]]
    ours, theirs = fleet.all("plain", "paceline_plain", repeats)
    by_rank = [reply["ms"] for replies in theirs for reply in replies]
    plain = statistics.median(max(column) for column in zip(*by_rank, strict=True))
    row = {
        "join": join_ms,
        "first": transfers[0],
        "transfer": statistics.median(transfers[1:]),
        "best": min(transfers[1:]),
        "worst": max(transfers[1:]),
        "pause": statistics.median(pauses),
        "call": statistics.median(call for call, _, _ in parts),
        "reset": statistics.median(reset for _, reset, _ in parts),
        "verdict": statistics.median(compare for _, _, compare in parts),
        "digest_learner": statistics.median(digests_l[1:]),
        "digest_rollout": statistics.median(digests_r[1:]),
        "plain": plain,
        "plain_learner": statistics.median(max(column) for column in zip(*ours, strict=True)),
        "rank_bytes": max(size for answer in received for size in answer["rank_bytes"]),
        "sent_bytes": max(answer["receipt"].num_bytes for answer in sent),
        "relayed_bytes": max(plan.relayed_bytes(rank) for rank in range(plan.num_destinations)),
        "rounds": plan.num_rounds,
        "extra_learner": max(answer["receipt"].peak_extra_bytes for answer in sent),
        "extra_rollout": max(answer["receipt"].peak_extra_bytes for answer in received),
        "grown_learner": max(grown),
        "pushes": 3 * repeats + 2,
    }
    fleet.describe(round_bytes, relay)
    row["rejoin"] = fleet.form()
    transfers = [fleet.push(version + 1 + number, HEAD_START_S)[0] for number in range(repeats + 1)]
    row |= {"first_again": transfers[0], "transfer_again": statistics.median(transfers[1:])}
    row["usual"] = fleet.usual(max(3, repeats // 3)) if usual else float("nan")
    return row


HEADINGS = (
    "case", "relay", "rounds", "join", "first", "transfer", "min..max", "digest l/r", "pause", "plain",
    "transfer/plain", "GB/rank", "GB/s", "out GB l/r", "extra MiB l/r", "usual", "usual/transfer",
)  # fmt: skip


def cells(case: Case, relay: str, row: dict[str, float]) -> list[str]:
    """Returns the cells of a row."""
    gb = row["rank_bytes"] / 1e9
    return [
        case.name,
        "off" if relay == "never" else "on",
        f"{row['rounds']:.0f}",
        f"{row['join']:.0f}/{row['rejoin']:.0f}",
        f"{row['first']:.1f}/{row['first_again']:.1f}",
        f"{row['transfer']:.1f}",
        f"{row['best']:.1f}..{row['worst']:.1f}",
        f"{row['digest_learner']:.1f}/{row['digest_rollout']:.1f}",
        f"{row['pause']:.1f}",
        f"{row['plain']:.1f}",
        f"{row['transfer'] / row['plain']:.2f}",
        f"{gb:.2f}",
        f"{1e3 * gb / row['transfer']:.0f}",
        f"{row['sent_bytes'] / 1e9:.2f}/{row['relayed_bytes'] / 1e9:.2f}",
        f"{row['extra_learner'] / 2**20:.0f}/{row['extra_rollout'] / 2**20:.0f}",
        f"{row['usual']:.0f}",
        f"{row['usual'] / row['transfer']:.1f}",
    ]


@contextlib.contextmanager
def running(cases: list[Case], gpus: Sequence[str], folder: Path) -> Iterator[list[Fleet]]:
    """Yields the fleets of these cases, all started together."""
    fleets = [Fleet(case) for case in cases]
    try:
        for fleet in fleets:
            place = folder / fleet.case.shape
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text(
                json.dumps(SHAPES[fleet.case.shape] | {"torch_dtype": fleet.case.dtype})
            )
            fleet.start(str(place), gpus)
        for fleet in fleets:
            fleet.ready()
        yield fleets
    finally:
        for fleet in fleets:
            fleet.stop()


def parse_args() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="0.5B,7B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--learners", type=int, default=4, help="FSDP2 ranks")
    parser.add_argument("--engines", default="1x4,2x2,4x1", help="engines x tensor-parallel size, row by row")
    parser.add_argument("--staging-mib", default="1024", help="staging memory of a rank, row by row")
    parser.add_argument(
        "--relay", default="never,auto", help="never, auto or always, row by row; auto only if it relays"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-usual", action="store_true", help="do not measure the usual way")
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="start all engines and learners together and measure the cases in turn",
    )
    parser.add_argument(
        "--trace", type=Path, help="folder for a trace of one push of each row, one file per rank"
    )
    parser.add_argument("--json", type=Path, help="write all numbers here")
    records.add_option(parser)
    return parser.parse_args()


def main() -> None:
    """Prints the table."""
    args = parse_args()
    layouts = [tuple(map(int, word.split("x"))) for word in args.engines.split(",")]
    cases = [
        Case(shape=name, num_learners=args.learners, num_engines=e, parallel_size=p, device=args.device)
        for name in args.shapes.split(",")
        for e, p in layouts
    ]
    needed = max(case.num_learners + case.num_engines * case.parallel_size for case in cases)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(needed)]
    table = Table(title=f"weight pushes, medians of {args.repeats}, milliseconds")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    rows, console = list[dict[str, Any]](), Console(width=210)
    names = [gpu.name for gpu in visible_gpus().values()]
    with tempfile.TemporaryDirectory() as folder:
        for batch in [cases] if args.at_once else [[case] for case in cases]:
            with running(batch, gpus, Path(folder)) as fleets:
                for fleet in fleets:
                    usual = not args.no_usual
                    variants = itertools.product(map(int, args.staging_mib.split(",")), args.relay.split(","))
                    for staging_mib, relay in variants:
                        row = measure(fleet, staging_mib << 19, relay, args.repeats, usual=usual)
                        if row is None:
                            continue
                        usual = False
                        if args.trace is not None:
                            place = args.trace / "-".join(
                                re.findall(r"[\w.]+", f"{fleet.case.name} {staging_mib} {relay}")
                            )
                            place.mkdir(parents=True, exist_ok=True)
                            fleet.trace(1000, place)
                        table.add_row(*cells(fleet.case, relay, row))
                        name = {"case": fleet.case.name, "relay": relay, "staging_mib": staging_mib}
                        rows.append(name | row)
                        what = args.record and f"{args.record}: {fleet.case.name}, relay {relay}"
                        used = needed if args.device == "cuda" else 0
                        records.keep(
                            "pushes", what, row["transfer"], beside=("plain", row["plain"]), gpus=names[:used]
                        )
                        print(json.dumps(rows[-1]), flush=True)
                        if args.json:
                            args.json.write_text(json.dumps(rows, indent=1))
    console.print(table)
    model = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    console.print(f"machine: {needed} x {model}, {os.cpu_count()} cores, torch {torch.__version__}")
    console.print(f"command: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
