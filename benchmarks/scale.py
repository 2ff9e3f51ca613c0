"""Measures the central costs of a step with many rows, and of a checkpoint with many ranks.

    python benchmarks/scale.py [--prompts 4096] [--samples 8 32 128] [--ranks 8 32 128 512]

Loads no model and starts no process. Seconds are CPU time of this process. For a step, measures the bytes of
the controller's `TrainOrder` to the learner, the time to write and read it, and the plan of micro-batches,
which every rank computes. For a checkpoint, measures the manifest, and rank 0's work on the plans of all
ranks for torch's metadata. The tensors are those of a 72B model with AdamW's averages; every rank has a shard
of each.
"""

from __future__ import annotations

import argparse
import os
import pickle
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from scale_pushes import qwen_72b
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from paceline.broker import names
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.run_record.manifest import manifest_fields
from paceline.core.training import BatchRow, TrainOrder
from paceline.learner.batch.planning.arithmetic import Arithmetic
from paceline.learner.batch.planning.plan import plan_batch, plan_chunk
from paceline.learner.checkpoint.files import FileRecord
from paceline.learner.checkpoint.manifest import Manifest
from paceline.learner.train.scoring import lengths
from paceline.wire.calls.training import decode_order, order_to_proto

T = TypeVar("T")

DATA_RANKS = 128
BUDGET = 32_768
PER_CHUNK = 512
"""Prompts per mini-batch"""
ARITHMETIC = Arithmetic(
    per_token=6 * 72_000_000_000, per_response_token=6 * 1_245_708_288, per_pair=3_932_160
)


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """Returns a call's result and CPU seconds."""
    began = time.process_time()
    result = act()
    return result, time.process_time() - began


def rows_of(prompts: int, samples: int) -> tuple[BatchRow, ...]:
    """Makes rows with prompts of 200 to 1,000 tokens and responses of up to 8,192."""
    draw = np.random.default_rng(0)
    prompt_tokens = draw.integers(200, 1000, prompts).tolist()
    response_tokens = draw.integers(100, 8193, prompts * samples).tolist()
    rows = []
    for prompt in range(prompts):
        for sample in range(samples):
            place = prompt * samples + sample
            own = TrajectoryId(step=1, purpose="train", prompt_id=prompt, sample_index=sample)
            rows.append(
                BatchRow(
                    trajectory_id=own,
                    blob_key=names.blob("run-0123456789ab", str(own), "rollout-000", "0" * 8),
                    blob_digest=f"{place:032x}",
                    reward=float(place % 2),
                    num_prompt_tokens=prompt_tokens[prompt],
                    num_response_tokens=response_tokens[place],
                    num_sampled_tokens=response_tokens[place],
                )
            )
    return tuple(rows)


def print_step(prompts: int, samples: int) -> None:
    """Prints a row of the table of steps."""
    rows = rows_of(prompts, samples)
    policy = PolicyTag(version=0, digest="0" * 16)
    order, digested = timed(lambda: TrainOrder(step=1, policy=policy, rows=rows))
    data, written = timed(lambda: order_to_proto(order).SerializeToString())
    _, read = timed(lambda: decode_order(data))
    cells = [f"{len(rows):,}", f"{len(data) / 2**20:.1f}", f"{digested + written:.1f}", f"{read:.1f}"]
    for shares in (False, True):
        make = partial(
            plan_chunk,
            num_data_ranks=DATA_RANKS,
            token_budget=BUDGET,
            arithmetic=ARITHMETIC,
            share_prompts=shares,
        )
        plan = partial(plan_batch, prompts_per_chunk=PER_CHUNK, make=make)
        _, planned = timed(lambda plan=plan: plan(lengths(rows)))  # type: ignore[misc]
        cells.append(f"{planned:.1f}")
    print(f"| {' | '.join(cells)} |", flush=True)


def save_plan(rank: int, num_ranks: int) -> planner.SavePlan:
    """Returns a rank's save plan: some rows of each tensor and of its two averages."""
    items = []
    for tensor in qwen_72b():
        length = -(-tensor.shape[0] // num_ranks)
        first = min(rank * length, tensor.shape[0])
        rows = min(length, tensor.shape[0] - first)
        if not rows:
            continue
        offsets = torch.Size([first, *[0] * (len(tensor.shape) - 1)])
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([rows, *tensor.shape[1:]]))
        items += [
            planner.WriteItem(
                index=MetadataIndex(tensor.name + part, offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=torch.float32),
                    size=torch.Size(tensor.shape),
                ),
            )
            for part in ("", ".exp_avg", ".exp_avg_sq")
        ]
    return planner.SavePlan(items)


def print_checkpoint(ranks: int) -> None:
    """Prints a row of the table of checkpoints."""
    files = {f"__{rank}_0.distcp": FileRecord(size=2**33, digest="0" * 32) for rank in range(ranks)}
    manifest = Manifest(
        step=1,
        world_size=ranks,
        model_path="model",
        has_critic=False,
        kl={},
        controller_state={},
        histories={},
        files=files,
    )
    text, written = timed(manifest.to_json)
    _, read = timed(lambda: manifest_fields(text, origin="manifest"))
    plans = [save_plan(rank, ranks) for rank in range(ranks)]
    # torch pickles plans and metadata.
    sent = len(pickle.dumps(plans[0]))
    (_, metadata), merged = timed(lambda: create_default_global_save_plan(plans))
    data, pickled = timed(lambda: pickle.dumps(metadata))
    print(
        f"| {ranks} | {len(text):,} | {1e3 * (written + read):.0f} | {sent / 2**10:,.0f} | {merged:.1f} "
        f"| {len(data) / 2**20:.1f} | {pickled:.1f} |",
        flush=True,
    )


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=4096, help="of a step")
    parser.add_argument("--samples", type=int, nargs="*", default=[8, 32, 128], help="per prompt")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 32, 128, 512], help="of the learner")
    args = parser.parse_args()
    print(f"$ python {' '.join(sys.argv)}")
    print(f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}\n")
    print(
        "| rows | MiB of TrainOrder | s to write it | s to read it, each rank | s to plan, each rank "
        "| with shared prompts |\n|---|---|---|---|---|---|"
    )
    for samples in args.samples:
        print_step(args.prompts, samples)
    print(
        "\n| ranks | bytes of the manifest | ms to write and read it | KiB of a rank's plan "
        "| s to merge all, rank 0 | MiB of torch's metadata | s to write it |\n|---|---|---|---|---|---|---|"
    )
    for ranks in args.ranks:
        print_checkpoint(ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
