"""Compares forms of the learner's update in one run: seconds, MFU, memory, and equality of results.

    torchrun --nproc-per-node 4 benchmarks/update.py                  # 4 GPUs: Qwen2.5-7B's shape
    python benchmarks/update.py --layers 8                            # one GPU: 8 of its layers
    python benchmarks/update.py --device cpu --shape tiny --layers 2 --sequences 8 --prompt 16 --response 16
    torchrun --nproc-per-node 2 benchmarks/update.py --shape 3B --forms 0 --context 2 --sequences 2 \\
        --samples 2 --prompt 1024 --response 130048 --micro-batch-tokens 65536    # 2 GPUs: each row on both

Runs the learner's own training step, from the plan to the optimizer step, with random weights, groups of
--samples samples, and GRPO with one mini-batch. Each form takes a step on a quarter of the rows, which
compiles it, a full step to fill the allocator, and a timed step. With --shared, the last two are repeated
with shared prompts.

MFU counts the operations of the tokens that went through the model, without recomputation, relative to the
vendor's peak; tokens/s count the tokens of the batch, per rank. `GiB` is the peak memory of tensors in the
update. `scoring` is the time of old log-probs. `gradient` is the relative difference of the gradient norm
from the first form's. `ratio` is the mean log-ratio of the first mini-batch. It must be 0, unless memory ran
out and micro-batches were halved: old log-probs were computed before, in larger micro-batches, and an
expert's rounding depends on its number of tokens. `compiling` is the time of the first step's compilations +
that of later ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import records
import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES

from paceline.config.load import parse, with_overrides
from paceline.config.run import RunConfig
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.training import BatchRow, TrainOrder
from paceline.learner.batch.types import PackedRow
from paceline.learner.distributed.ranks import RankEnvironment, Ranks, form_group, leave_group, open_store
from paceline.learner.distributed.shards import own_part
from paceline.learner.model.decoder.layers import LayerOptions
from paceline.learner.model.loading import Precision, hugging_face_names, unfilled_policy
from paceline.learner.train.state.learner import DTYPES, Learner
from paceline.learner.train.state.shared_prompts import SharedPrompts, SharingMode
from paceline.learner.train.step import train_step

POLICY = PolicyTag(version=0, digest="0" * 16)
WAIT_S = 300.0
SAID = ("timing_s/", "perf/", "actor/grad_norm", "actor/first_ppo_kl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A form of the update, which is a row of the table; `sequences` is per micro-batch."""

    sequences: int = 8
    compiled: bool = True
    recompute: float | str = "none"
    keep_gathered: bool = False
    accumulate: bool = True
    reduce_dtype: str = "float32"

    def actor(self, row_tokens: int, micro_batch_tokens: int | None = None) -> dict[str, Any]:
        """Returns the section `actor`."""
        return {
            "compile": self.compiled,
            "reduce_dtype": self.reduce_dtype,
            "ppo_max_token_len_per_gpu": micro_batch_tokens or self.sequences * row_tokens,
            "memory": {
                "recompute": self.recompute,
                "keep_gathered": self.keep_gathered,
                "accumulate": self.accumulate,
            },
        }


FORMS = {
    "eager, all recomputed": Form(sequences=16, compiled=False, recompute="full"),
    "compiled, all recomputed": Form(sequences=16, recompute="full"),
    "compiled": Form(),
    "compiled, gathered": Form(keep_gathered=True),
    "compiled, 0.7 kept, gathered, bf16 reduction": Form(
        recompute=0.7, keep_gathered=True, reduce_dtype="bfloat16"
    ),
    "compiled, gathered, reduced every time": Form(keep_gathered=True, accumulate=False),
    "compiled, 0.7 kept, gathered, bf16 reduced every time": Form(
        recompute=0.7, keep_gathered=True, accumulate=False, reduce_dtype="bfloat16"
    ),
    "eager": Form(compiled=False),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the forms and prints the table."""
    args = parse_args(argv)
    environment = RankEnvironment.read()
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", environment.local_rank)
    store = open_store(environment, WAIT_S)
    ranks = form_group(
        environment,
        store,
        device,
        WAIT_S,
        context=max(args.context, args.tensor),
        fsdp_size=args.fsdp_size,
        expert=args.experts,
        tensor=args.tensor,
    )
    rows, norms, seconds = [], [], []
    try:
        with tempfile.TemporaryDirectory() as folder:
            shape = SHAPES[args.shape] | ({} if args.layers is None else {"num_hidden_layers": args.layers})
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            for number in args.forms:
                name, form = list(FORMS.items())[number]
                for mode, metrics in measure(Path(folder), form, args, ranks).items():
                    norms.append(metrics["actor/grad_norm"])
                    seconds.append(metrics["timing_s/update_actor"])
                    rows.append(
                        cells(name if mode == "off" else "  shared prompts", form, metrics, args, norms)
                    )
                    if ranks.world.rank == 0:
                        said = {key: metrics[key] for key in metrics if key.startswith(SAID)}
                        print(f"{name}, {mode}: {json.dumps(said)}", flush=True)
    finally:
        leave_group()
    if ranks.world.rank == 0:
        show(rows, args, ranks)
        on_gpus = ranks.device.type == "cuda"
        gpus = [torch.cuda.get_device_name(ranks.device)] * ranks.world.size if on_gpus else []
        records.keep("updates", args.record, min(seconds), gpus=gpus)
    assert statistics.pstdev(norms) <= 0.02 * norms[0], f"gradient norms differ: {norms}"
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="7B")
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--sequences", type=int, default=32, help="sequences per group of ranks, a multiple of --samples"
    )
    records.add_option(parser)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument(
        "--micro-batch-tokens", type=int, help="tokens per rank, instead of the form's sequences"
    )
    parser.add_argument("--context", type=int, default=1, help="ranks that share each row")
    parser.add_argument("--fsdp-size", type=int, help="ranks that share a copy of the weights; default: all")
    parser.add_argument("--experts", type=int, default=1, help="ranks over which experts are divided")
    parser.add_argument("--tensor", type=int, default=1, help="ranks over which matrices are divided")
    parser.add_argument(
        "--kernels", type=int, default=0, help="list this many kernels of a last step of rank 0"
    )
    parser.add_argument("--shared", action="store_true", help="also run each form with shared prompts")
    parser.add_argument(
        "--forms",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[0, 1, 2, 3, 4],
        help="\n".join(f"{number}: {name}" for number, name in enumerate(FORMS)),
    )
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="of every form")
    return parser.parse_intermixed_args(argv)


def measure(
    folder: Path, form: Form, args: argparse.Namespace, ranks: Ranks
) -> dict[SharingMode, dict[str, float]]:
    """Returns metrics of the timed steps, by whether prompts are shared."""
    torch.compiler.reset()  # or the form would use the kernels of the form before it
    config = configuration(folder, form, args, ranks)
    learner = build(config, ranks)
    num_prompts = args.sequences * ranks.data.size // args.samples
    first = step(learner, max(1, num_prompts // 4), args)
    results: dict[SharingMode, dict[str, float]] = {}
    modes: tuple[SharingMode, ...] = ("off", "auto") if args.shared else ("off",)
    for mode in modes:
        learner.shared_prompts = SharedPrompts(mode, DTYPES[config.model.dtype], print)
        warm = step(learner, num_prompts, args)
        results[mode] = step(learner, num_prompts, args)
        results[mode]["compile_s"] = first.get("perf/compile_s", 0.0)
        results[mode]["later_s"] = warm.get("perf/compile_s", 0.0) + results[mode].get("perf/compile_s", 0.0)
    if args.kernels:
        with torch.profiler.profile() as profile:
            step(learner, num_prompts, args)
        if ranks.world.rank == 0:
            averages = profile.key_averages()
            print(averages.table(sort_by="self_cuda_time_total", row_limit=args.kernels), flush=True)
    del learner
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return results


def configuration(folder: Path, form: Form, args: argparse.Namespace, ranks: Ranks) -> RunConfig:
    """Returns the run's configuration, with the ratio measured in every step."""
    tree = {
        "data": {
            "train_files": "none.jsonl",
            "max_prompt_length": args.prompt,
            "max_response_length": args.response,
            "train_batch_size": args.sequences * ranks.data.size,
        },
        "model": {"path": str(folder), "dtype": "bfloat16" if args.device == "cuda" else "float32"},
        "actor": {
            "ppo_mini_batch_size": args.sequences * ranks.data.size,
            "ratio_audit_freq": 1,
            "optim": {"lr": 1e-9},
            **form.actor(args.prompt + args.response, args.micro_batch_tokens),
        },
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
        "rollout": {"n": args.samples},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 10},
        "learner": {
            "world_size": ranks.world.size,
            "context_parallel": max(args.context, args.tensor),
            "fsdp_size": args.fsdp_size,
            "expert_parallel": args.experts,
            "tensor_parallel": args.tensor,
        },
    }
    return parse(RunConfig, with_overrides(tree, args.overrides))


def build(config: RunConfig, ranks: Ranks) -> Learner:
    """Returns a learner with random weights and optimizer averages."""
    precision = Precision(compute=DTYPES[config.model.dtype], reduce=DTYPES[config.actor.reduce_dtype])
    options = LayerOptions.of_actor(config.actor, ranks)
    policy = unfilled_policy(
        Path(config.model.path), ranks, precision, options=options, lora=config.model.lora
    )
    fill(policy, ranks)
    learner = Learner.around(config, ranks, policy, notify=print)
    learner.make_averages()
    return learner


@torch.no_grad()
def fill(policy: torch.nn.Module, ranks: Ranks) -> None:
    """Draws the weights on the device; they are equal for every form and mesh."""
    generator = torch.Generator(ranks.device).manual_seed(0)
    for name, parameter in hugging_face_names(policy):
        local, box = own_part(parameter)
        if parameter.dim() > 1:
            full = torch.empty(parameter.shape, dtype=local.dtype, device=local.device)
            local.copy_(full.normal_(0.0, 0.02, generator=generator)[box.slices])
        else:
            local.fill_(0.0 if name.endswith("bias") else 1.0)


def step(learner: Learner, num_prompts: int, args: argparse.Namespace) -> dict[str, float]:
    """Takes a training step on random rows; returns its metrics."""
    rng = np.random.default_rng(0)
    vocab = learner.vocab_size
    packed: dict[int, PackedRow] = {}
    rows: list[BatchRow] = []
    for prompt_id in range(num_prompts):
        prompt = rng.integers(0, vocab, args.prompt).astype(np.int32)
        for sample in range(args.samples):
            index = len(rows)
            packed[index] = PackedRow(
                index=index,
                prompt_token_ids=prompt,
                response_token_ids=rng.integers(0, vocab, args.response).astype(np.int32),
                response_mask=np.ones(args.response, np.uint8),
                response_log_probs=np.full(args.response, -11.9, np.float32),
            )
            rows.append(
                BatchRow(
                    trajectory_id=TrajectoryId(
                        step=1, purpose="train", prompt_id=prompt_id, sample_index=sample
                    ),
                    blob_key=str(index),
                    blob_digest="",
                    reward=float(rng.normal()),
                    num_prompt_tokens=args.prompt,
                    num_response_tokens=args.response,
                    num_sampled_tokens=args.response,
                )
            )
    order = TrainOrder(step=learner.version + 1, policy=POLICY, rows=tuple(rows))
    result = train_step(learner, order, lambda wanted: {index: packed[index] for index in wanted})
    assert not result.skip_reasons, result.skip_reasons
    ratio = result.metrics["actor/first_ppo_kl"]
    if "guard/out_of_memory" in result.metrics:
        print(f"micro-batches were halved after old log-probs: mean log-ratio {ratio:.1e}", flush=True)
    else:
        assert ratio == 0.0, f"old log-probs and update were computed differently: mean log-ratio {ratio:.1e}"
    return dict(result.metrics)


def cells(
    name: str,
    form: Form,
    metrics: Mapping[str, float],
    args: argparse.Namespace,
    norms: Sequence[float],
) -> list[str]:
    """Returns a row of the table."""
    seconds, scoring = metrics["timing_s/update_actor"], metrics["timing_s/old_log_prob"]
    tokens = args.sequences * (args.prompt + args.response) / max(args.context, args.tensor)
    mfu = metrics.get("perf/mfu")
    memory = metrics.get("perf/memory_gib/update_actor")
    return [
        name,
        str(args.micro_batch_tokens or form.sequences),
        f"{seconds:.2f}",
        "-" if mfu is None else f"{mfu * metrics['perf/computed_share']:.3f}",
        f"{tokens / seconds:,.0f}",
        f"{tokens / scoring:,.0f}",
        "-" if memory is None else f"{memory:.1f}",
        f"{metrics['actor/grad_norm'] / norms[0] - 1:+.1e}",
        f"{metrics['actor/first_ppo_kl']:.1e}",
        f"{metrics['compile_s']:.0f} + {metrics['later_s']:.0f}" if form.compiled else "",
    ]


def show(rows: Sequence[Sequence[str]], args: argparse.Namespace, ranks: Ranks) -> None:
    """Prints the table."""
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    table = Table(
        title=f"{args.shape}, {args.layers or 'all'} layers, {ranks.world.size} ranks of {args.sequences} "
        f"sequences of {args.prompt} + {args.response} tokens, {device}, torch {torch.__version__}"
    )
    for column in (
        "form",
        "per micro-batch",
        "update s",
        "MFU",
        "tokens/s",
        "scoring tokens/s",
        "GiB",
        "gradient",
        "ratio",
        "compiling s",
    ):
        table.add_column(column, justify="left" if column == "form" else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
