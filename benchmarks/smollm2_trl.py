"""Runs examples/smollm2/tasks.yaml in TRL, with the same model, rows, reward, batch, steps and learning rate.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch trl==1.16.0 vllm reasoning-gym
    PYTHONPATH=src /tmp/trl/bin/python benchmarks/smollm2_trl.py --vllm 0.3 --out runs/trl-0
    paceline eval examples/smollm2/tasks.yaml model.path=runs/trl-0 --n 8 --temperature 1

TRL is not a dependency of Paceline and needs a separate environment. Numbers come from the configuration. As
in Paceline, the loss is GRPO's mean over tokens without KL, weights and AdamW's averages are float32, and
forward passes compute in `model.dtype`; vLLM generates in TRL's process. Prints the seconds from the command
to the first step, the median seconds per step from the second on, sampled tokens/s of complete steps, and the
rewards.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.time()
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples/smollm2"))

import torch  # noqa: E402
import yaml  # noqa: E402
from datasets import Dataset  # noqa: E402
from tasks import last_number  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def main() -> int:
    """Trains and prints a line of JSON."""
    args = parse_args()
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    data, steps = config["data"], args.steps or config["trainer"]["total_steps"]
    batch = (args.prompts or data["train_batch_size"]) * config["rollout"]["n"]
    updates = data["train_batch_size"] // config["actor"]["ppo_mini_batch_size"]
    rewards: list[float] = []
    times = Times(updates)

    def reward(completions: list[Any], data_source: list[str], entry: list[str], **_: Any) -> list[float]:
        scores = [
            last_number(turns[0]["content"], "", data_source=task, entry=kept)
            for turns, task, kept in zip(completions, data_source, entry, strict=True)
        ]
        rewards.append(statistics.fmean(scores))
        return scores

    trainer = GRPOTrainer(
        model=str(ROOT / config["model"]["path"]),
        reward_funcs=reward,
        args=settings(args, config, steps, batch, updates),
        train_dataset=Dataset.from_list(rows(data)),
        processing_class=AutoTokenizer.from_pretrained(ROOT / config["model"]["path"]),
        callbacks=[times],
    )
    trainer.train()
    trainer.save_model(str(args.out))
    seconds = [after - before for before, after in itertools.pairwise(times.ends)]
    logged = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    tokens = statistics.fmean(line["completions/mean_length"] for line in logged[1:] or logged) * batch
    median = statistics.median(seconds[1:] or seconds)
    measured = {
        "start_s": round(times.ends[0] - BEGAN, 1),
        "step_s": round(median, 2),
        "sampled_tokens_per_s": round(tokens / median),
        "samples": batch * steps,
        "rewards": [round(one, 3) for one in rewards],
    }
    print(json.dumps(measured))
    return 0


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "examples/smollm2/tasks.yaml")
    parser.add_argument("--steps", type=int, help="instead of trainer.total_steps")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="instead of model.dtype")
    parser.add_argument("--prompts", type=int, help="instead of data.train_batch_size")
    parser.add_argument("--rows-at-once", type=int, default=128, help="samples of a micro-batch")
    parser.add_argument(
        "--vllm", type=float, default=0.0, help="vLLM's share of the GPU; 0: transformers generates"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    return parser.parse_args()


class Times(TrainerCallback):  # type: ignore[misc]
    """Records the beginning of training and the end of each generation batch of `updates` updates."""

    def __init__(self, updates: int) -> None:
        self.ends: list[float] = []
        self._updates = updates

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Records when training begins."""
        self.ends.append(time.time())

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Records when the updates of a generation batch are done."""
        if state.global_step % self._updates == 0:
            self.ends.append(time.time())


def rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the training rows, with the system prompt of the configuration."""
    examples = [json.loads(line) for line in (ROOT / data["train_files"]).read_text().splitlines()]
    for row in examples:
        row["prompt"].insert(0, {"role": "system", "content": data["system_prompt"]})
    return examples


def settings(
    args: argparse.Namespace, config: dict[str, Any], steps: int, batch: int, updates: int
) -> GRPOConfig:
    """Returns TRL's configuration of the run."""
    data, rows_at_once = config["data"], min(args.rows_at_once, batch)
    longest = data["max_prompt_length"] + data["max_response_length"]
    vllm_options = {"vllm_gpu_memory_utilization": args.vllm, "vllm_max_model_length": longest}
    return GRPOConfig(
        output_dir=str(args.out),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=batch // rows_at_once // updates,
        steps_per_generation=batch // rows_at_once,
        num_generations=config["rollout"]["n"],
        max_completion_length=data["max_response_length"],
        max_steps=steps * updates,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=config["actor"]["optim"]["lr"],
        weight_decay=0.01,
        lr_scheduler_type="constant",
        temperature=1.0,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not torch.cuda.is_available(),
        bf16=(args.dtype or config["model"]["dtype"]) == "bfloat16",
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=args.seed,
        use_vllm=args.vllm > 0,
        vllm_mode="colocate",
        **(vllm_options if args.vllm else {}),
    )


if __name__ == "__main__":
    sys.exit(main())
