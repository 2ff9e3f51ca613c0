"""Steps that were timed on GPUs, with their settings (benchmarks/journal/gpus.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.cards import CARDS
from paceline.models.model_shape import ModelShape
from paceline.sizing.step_time import StepTime


def qwen(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "0.5B": qwen(896, 4864, 24, 14, 2, 151_936, tied=True),
    "1.5B": qwen(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "3B": qwen(2048, 11_008, 36, 16, 2, 151_936, tied=True),
    "7B": qwen(3584, 18_944, 28, 28, 4, 152_064, tied=False),
    "32B": qwen(5120, 27_648, 64, 40, 8, 152_064, tied=False),
}
KEPT = {"recompute": "none", "keep_gathered": True, "accumulate": True, "offload": False}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A run of benchmarks/journal/gpus.md: its settings, and the seconds of generation, update and step."""

    shape: str
    card: str
    gpus: int
    prompts: int
    seconds: tuple[float, float, float]
    prompt: int = 512
    response: int = 1024
    mean: tuple[int, int] | None = None
    num_seqs: int = 128
    micro_batch: int = 8704
    sleep: str = "never"
    memory: dict[str, Any] | None = None
    compiled: bool = True
    split: bool = False
    eager: bool = False
    lora: dict[str, Any] | None = None
    samples: int = 8
    estimator: str = "grpo"
    bound: int | None = None
    in_flight: str = "wait"
    apart: bool = False

    @property
    def config(self) -> RunConfig:
        ranks = self.gpus // 2 if self.split else self.gpus
        devices = list(range(ranks))
        model: dict[str, Any] = {"path": "model", "dtype": "bfloat16"}
        bounded = {"barrier": {"mode": "bounded", "max_staleness": self.bound}}
        return parse(
            RunConfig,
            {
                "data": {
                    "train_files": ["x.parquet"],
                    "max_prompt_length": self.prompt,
                    "max_response_length": self.response,
                    "train_batch_size": self.prompts,
                },
                "model": model if self.lora is None else model | {"lora": self.lora},
                "algorithm": {"adv_estimator": self.estimator},
                "actor": {
                    "ppo_mini_batch_size": self.prompts // 2,
                    "ppo_max_token_len_per_gpu": self.micro_batch,
                    "compile": self.compiled,
                    "memory": KEPT if self.memory is None else self.memory,
                },
                "learner": {"world_size": ranks, "devices": devices},
                "rollout": {
                    "n": self.samples,
                    "replicas": ranks,
                    "max_num_seqs": self.num_seqs,
                    "sleep": self.sleep,
                    "enforce_eager": self.eager,
                    "sampler": "batched",
                    "in_flight": self.in_flight,
                    "engine_kwargs": {"distributed_executor_backend": "mp" if self.apart else "uni"},
                    "devices": [gpu + ranks for gpu in devices] if self.split else devices,
                },
                "reward": {"functions": [{"name": "exact_match"}]},
                "trainer": {"total_steps": 1},
            }
            | (bounded if self.bound is not None else {}),
        )

    @property
    def estimate(self) -> StepTime:
        shape = ModelShape.of(SHAPES[self.shape])
        assert shape is not None
        prompt, response = self.mean or (None, None)
        card = CARDS[self.card]
        return StepTime.of(self.config, shape, card, prompt_tokens=prompt, response_tokens=response)


APART = Timed(
    shape="1.5B",
    card="H200",
    gpus=1,
    prompts=32,
    num_seqs=256,
    micro_batch=17_408,
    apart=True,
    seconds=(5.92, 5.39, 12.4),
)
ON_HOST = {"keep_gathered": False, "accumulate": False, "offload": True}
OFFLOADED = {"recompute": "full", "keep_gathered": False, "accumulate": False, "offload": True}
TIMED = {
    "1.5B in turns": Timed(
        shape="1.5B",
        card="H100",
        gpus=1,
        prompts=32,
        num_seqs=256,
        micro_batch=17_408,
        sleep="always",
        seconds=(8.7, 6.3, 16.5),
    ),
    "1.5B, another H100": Timed(
        shape="1.5B",
        card="H100",
        gpus=1,
        prompts=32,
        num_seqs=256,
        micro_batch=17_408,
        seconds=(6.9, 6.0, 14.5),
    ),
    "3B": Timed(shape="3B", card="H100", gpus=2, prompts=32, seconds=(6.7, 6.1, 14.4)),
    "1.5B, PPO with a critic": Timed(
        shape="1.5B",
        card="H100",
        gpus=1,
        prompts=32,
        samples=4,
        estimator="gae",
        micro_batch=9216,
        sleep="always",
        seconds=(5.53, 6.16, 14.48),
    ),
    "1.5B with adapters": Timed(
        shape="1.5B",
        card="H100",
        gpus=1,
        prompts=32,
        num_seqs=256,
        micro_batch=16_384,
        compiled=False,
        lora={"rank": 32},
        seconds=(7.75, 7.73, 17.51),
    ),
    "3B with FlashAttention 4": Timed(
        shape="3B", card="H100", gpus=2, prompts=32, sleep="always", seconds=(6.34, 5.55, 13.72)
    ),
    "3B, engines awake": Timed(
        shape="3B",
        card="H100",
        gpus=2,
        prompts=32,
        memory=KEPT | {"recompute": 0.9},
        seconds=(6.26, 5.45, 13.38),
    ),
    "3B, engines awake, mixed lengths": Timed(
        shape="3B",
        card="H100",
        gpus=2,
        prompts=32,
        mean=(320, 456),
        memory=KEPT | {"recompute": 0.9},
        seconds=(5.08, 2.74, 8.95),
    ),
    "3B in turns, mixed lengths": Timed(
        shape="3B",
        card="H100",
        gpus=2,
        prompts=32,
        mean=(320, 455),
        sleep="always",
        seconds=(5.11, 2.94, 9.87),
    ),
    "7B, two H100s, mixed lengths": Timed(
        shape="7B",
        card="H100",
        gpus=2,
        prompts=32,
        mean=(320, 456),
        sleep="always",
        memory=ON_HOST | {"recompute": 0.9},
        seconds=(7.63, 8.50, 18.55),
    ),
    "7B, two H100s, a quarter kept": Timed(
        shape="7B",
        card="H100",
        gpus=2,
        prompts=32,
        micro_batch=16_384,
        sleep="always",
        memory=ON_HOST | {"recompute": 0.25, "keep_gathered": True},
        seconds=(9.72, 14.97, 27.01),
    ),
    "7B, two H100s, most kept": Timed(
        shape="7B",
        card="H100",
        gpus=2,
        prompts=32,
        sleep="always",
        memory=ON_HOST | {"recompute": 0.9},
        seconds=(9.25, 14.08, 25.97),
    ),
    "7B, two H100s, cut groups": Timed(
        shape="7B",
        card="H100",
        gpus=2,
        prompts=32,
        micro_batch=8192,
        sleep="always",
        memory=ON_HOST | {"recompute": 0.75},
        seconds=(9.20, 16.78, 29.02),
    ),
    "7B, four H100s, cut groups": Timed(
        shape="7B",
        card="H100",
        gpus=4,
        prompts=64,
        micro_batch=8192,
        sleep="always",
        memory=ON_HOST | {"offload": False, "recompute": 0.75},
        seconds=(9.89, 14.85, 28.56),
    ),
    "0.5B, long answers": Timed(
        shape="0.5B",
        card="H100",
        gpus=1,
        prompts=16,
        prompt=256,
        response=4096,
        mean=(160, 1783),
        num_seqs=256,
        micro_batch=16_384,
        seconds=(10.26, 2.25, 13.0),
    ),
    "7B, four H100s": Timed(
        shape="7B",
        card="H100",
        gpus=4,
        prompts=64,
        sleep="always",
        memory=ON_HOST | {"recompute": 0.9},
        seconds=(9.23, 13.55, 25.79),
    ),
    "7B, four H100s, averages kept": Timed(
        shape="7B",
        card="H100",
        gpus=4,
        prompts=64,
        sleep="always",
        memory=ON_HOST | {"offload": False, "recompute": 0.9},
        seconds=(9.47, 12.28, 25.78),
    ),
    "7B, four GPUs": Timed(shape="7B", card="H200", gpus=4, prompts=64, seconds=(7.51, 10.58, 20.42)),
    "7B, mixed lengths": Timed(
        shape="7B",
        card="H200",
        gpus=4,
        prompts=64,
        mean=(320, 456),
        micro_batch=12_288,
        sleep="always",
        memory=KEPT | {"recompute": 0.9},
        seconds=(5.85, 5.01, 12.71),
    ),
    "7B, two GPUs": Timed(
        shape="7B",
        card="H200",
        gpus=2,
        prompts=32,
        sleep="always",
        memory=KEPT | {"recompute": 0.9},
        seconds=(7.64, 11.58, 21.82),
    ),
    "3B, divided, mixed lengths": Timed(
        shape="3B",
        card="H200",
        gpus=2,
        prompts=32,
        response=2048,
        mean=(320, 830),
        num_seqs=64,
        micro_batch=16_384,
        split=True,
        seconds=(20.7, 9.2, 32.0),
    ),
    "3B, engines awake, long answers": Timed(
        shape="3B",
        card="H200",
        gpus=2,
        prompts=16,
        prompt=256,
        response=4096,
        mean=(160, 1792),
        num_seqs=64,
        micro_batch=17_408,
        seconds=(14.85, 4.79, 20.56),
    ),
    "1.5B, model apart": APART,
    "1.5B, model apart, mixed lengths": replace(APART, mean=(320, 453), seconds=(3.95, 2.39, 6.90)),
    "1.5B with adapters, model apart": replace(APART, lora={"rank": 32}, seconds=(5.55, 4.61, 11.4)),
    "3B in turns, model apart": replace(APART, shape="3B", sleep="always", seconds=(7.62, 10.27, 20.48)),
    "0.5B, long answers, model apart": replace(
        APART,
        shape="0.5B",
        prompts=16,
        prompt=256,
        response=4096,
        mean=(160, 1860),
        micro_batch=16_384,
        seconds=(8.41, 2.03, 11.2),
    ),
    "32B, averages on the host": Timed(
        shape="32B",
        card="H200",
        gpus=4,
        prompts=8,
        prompt=256,
        response=256,
        num_seqs=64,
        micro_batch=8192,
        sleep="always",
        compiled=False,
        memory=OFFLOADED,
        seconds=(4.9, 8.2, 14.8),
    ),
    "32B with adapters": Timed(
        shape="32B",
        card="H200",
        gpus=1,
        prompts=8,
        prompt=256,
        response=256,
        num_seqs=64,
        micro_batch=8192,
        sleep="always",
        compiled=False,
        eager=True,
        memory=KEPT | {"recompute": "full"},
        lora={"rank": 32, "alpha": 64, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        seconds=(8.5, 7.1, 17.5),
    ),
}

# 3B with answers of log-normal lengths, one learner rank and one engine on two H200s, by the bound and by
# what a push does to begun answers. Generation is what the learner waited for.
DIVIDED = Timed(
    shape="3B",
    card="H200",
    gpus=2,
    prompts=16,
    prompt=256,
    response=4096,
    mean=(160, 1830),
    micro_batch=17_408,
    split=True,
    seconds=(17.6, 9.26, 28.4),
)
BOUNDED = {
    "strict": DIVIDED,
    "0": replace(DIVIDED, bound=0),
    "1": replace(DIVIDED, bound=1, num_seqs=256, seconds=(6.76, 8.25, 17.9)),
    "1, in flight": replace(DIVIDED, bound=1, in_flight="keep", num_seqs=256, seconds=(4.49, 8.60, 16.2)),
    "4, in flight": replace(DIVIDED, bound=4, in_flight="keep", num_seqs=512, seconds=(0.0, 8.49, 11.6)),
}


def write_project(folder: Path) -> None:
    """Writes a run of 3B, and the config.json of every shape."""
    for name, tree in SHAPES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(tree))
    (folder / "run.yaml").write_text(
        "data: {train_files: [x.parquet], max_prompt_length: 512, max_response_length: 1024, "
        "train_batch_size: 32}\n"
        "model: {path: 3B}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "rollout: {n: 8}\n"
        "actor: {ppo_mini_batch_size: 16}\n"
        "reward: {functions: [{name: exact_match}]}\n"
        "trainer: {total_steps: 10}\n"
    )
