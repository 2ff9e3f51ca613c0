"""`benchmarks/against_verl.py`: verl's settings, the steps in its output, and runs with stand-ins."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from pyarrow import parquet

from paceline.cli.convert.convert import convert
from support import source

# Every key that is set. Each was looked up in the configuration that verl 0.9.1 composes, and taken by Hydra:
# with hydra-core 1.3.8 in an environment of its own, and the folder verl/trainer/config of verl's wheel,
#     with initialize_config_dir(folder, version_base=None):
#         compose("ppo_trainer", overrides=against_verl.hydra_overrides(settings))
# which refuses a key that is not there. A change of this list asks for the same again.
COMPOSED = {
    *(f"data.{name}" for name in ("train_files", "val_files", "train_batch_size", "shuffle")),
    *(f"data.max_{name}_length" for name in ("prompt", "response")),
    *(f"algorithm.{name}" for name in ("adv_estimator", "use_kl_in_reward")),
    *(f"actor_rollout_ref.model.{name}" for name in ("path", "tokenizer_path", "use_remove_padding")),
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    *(f"actor_rollout_ref.actor.{name}" for name in ("strategy", "optim.lr", "ppo_mini_batch_size")),
    *(f"actor_rollout_ref.actor.{name}" for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu")),
    *(f"actor_rollout_ref.actor.{name}" for name in ("use_kl_loss", "entropy_coeff")),
    *(f"actor_rollout_ref.actor.fsdp_config.{name}" for name in ("model_dtype", "dtype", "param_offload")),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    *(f"actor_rollout_ref.rollout.{name}" for name in ("name", "n", "dtype", "tensor_model_parallel_size")),
    *(f"actor_rollout_ref.rollout.{name}" for name in ("gpu_memory_utilization", "enforce_eager")),
    "actor_rollout_ref.rollout.ignore_eos",
    *(f"reward.custom_reward_function.{name}" for name in ("path", "name")),
    *(f"trainer.{name}" for name in ("n_gpus_per_node", "nnodes", "total_epochs", "total_training_steps")),
    *(f"trainer.{name}" for name in ("logger", "val_before_train", "test_freq", "save_freq")),
    *(f"trainer.{name}" for name in ("resume_mode", "default_local_dir")),
}
# Written by verl's own `concat_dict_to_str` from such metrics; Ray puts the process before it.
STEP_2 = (
    "step:2 - actor/entropy:11.93146800994873 - training/rollout_probs_diff_valid:1 - actor/pg_loss:-3.5e-09"
    " - actor/lr:np.float64(1e-06) - perf/mfu/actor:np.float64(0.3812) - training/global_step:2"
    " - response_length/mean:1024.0 - prompt_length/mean:512.0 - num_turns/min:np.int32(2)"
    " - timing_s/gen:10.12 - timing_s/old_log_prob:3.91 - timing_s/update_actor:13.25 - timing_s/step:28.1"
    " - perf/total_num_tokens:393216 - perf/throughput:6996.7 - actor/grad_norm:nan"
)
OUTPUT = f"""ray init kwargs: {{'num_cpus': None}}
\x1b[36m(TaskRunnerV1 pid=4088)\x1b[0m step:0 - val-core/even_words/acc/mean@1:0.5
\x1b[36m(TaskRunnerV1 pid=4088)\x1b[0m \rTraining Progress:  25%|##5       | 1/4 [00:41<02:03, 41.1s/it]
(WorkerDict pid=4711) INFO step: 3 - loading
\x1b[36m(TaskRunnerV1 pid=4088)\x1b[0m {STEP_2}
(TaskRunnerV1 pid=4088) step:3 - timing_s/step:27.5 - note:text - timing_s/gen:9"""

FAKE_VERL = """#!{python}
import json, os, subprocess, sys, time
if sys.argv[1] == "-c":
    print(json.dumps({{"verl": {version}, "torch": "2.11.0", "vllm": "0.24.0", "transformers": None}}))
    sys.exit()
folder = {folder!r}
with open(folder + "/calls.jsonl", "a") as file:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("PYTHONPATH")
    seen += (os.environ.get("VERL_USE_EXTERNAL_MODULES"),)
    file.write(json.dumps({{"argv": sys.argv[1:], "seen": seen, "cwd": os.getcwd()}}) + "\\n")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(folder + "/children", "a").write(str(child.pid) + "\\n")
for number, seconds in enumerate({seconds}, start=1):
    print("(TaskRunnerV1 pid=7) step:%d - timing_s/gen:%s - timing_s/old_log_prob:%s"
          " - timing_s/update_actor:%s - timing_s/step:%s - prompt_length/mean:{prompt_tokens}"
          " - response_length/mean:16.0"
          % (number, seconds / 4, seconds / 8, seconds / 2, seconds), flush=True)
{last}
"""
FAKE_PACELINE = """
import json, os, sys, time
path, seconds = sys.argv[1], json.loads(sys.argv[2])
os.makedirs(os.path.dirname(path))
with open(path, "w") as file:
    for number, step_s in enumerate(seconds, start=1):
        line = {"step": number, "timing_s/step": step_s, "timing_s/gen": step_s / 2}
        line |= {"timing_s/old_log_prob": 0.1, "timing_s/update_actor": step_s / 4}
        line |= {"perf/tokens_per_s": 4 * 2 * (32 + 16) / step_s}
        file.write(json.dumps(line) + "\\n")
time.sleep(600)
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(source.ROOT / "benchmarks"))
    names = ("against_verl", "verl_side", "step")
    yield importlib.import_module("against_verl")
    for name in names:
        sys.modules.pop(name, None)


def test_verl_gives_flash_attn_4_the_longest_sequence_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor in the key of a compiled kernel is never found again."""
    name = "prepare_fa_kwargs_from_position_ids"
    monkeypatch.setattr(flash, name, getattr(flash, name))  # put back after the test
    monkeypatch.syspath_prepend(str(source.ROOT / "benchmarks" / "verl_modules"))
    monkeypatch.delitem(sys.modules, "verl_flash4", raising=False)
    importlib.import_module("verl_flash4")
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4]])
    for _ in range(2):
        bounds, longest = getattr(flash, name)(positions)
        assert [(type(number), number) for number in longest] == [(int, 5)] * 2
        assert bounds[0].tolist() == [0, 3, 5, 10]
    assert getattr(flash, name)(positions[:, :3])[1] == (3, 3)


def arguments(program: ModuleType, *options: str) -> argparse.Namespace:
    given: argparse.Namespace = program.parse_args(["--verl", "python", "--gpus", "2", *options])
    return given


def settings(program: ModuleType, work: Path, *options: str) -> dict[str, Any]:
    args = arguments(program, *options)
    ours = program.step.configuration(program.step_options(args, work), work)
    theirs: dict[str, Any] = program.verl_side.settings_of(ours, work, args.gpus)
    return theirs


def test_only_keys_that_verl_composes_are_set(program: ModuleType, tmp_path: Path) -> None:
    assert set(settings(program, tmp_path)) == COMPOSED


def test_both_sides_get_the_same_batch_lengths_and_rate(program: ModuleType, tmp_path: Path) -> None:
    """Paceline's converter reads verl's settings; what comes out is what Paceline's side is given."""
    options = [
        "--prompts=24",
        "--samples=4",
        "--mini-batches=3",
        "--prompt-tokens=96",
        "--response-tokens=48",
    ]
    theirs = settings(program, tmp_path, *options, "--steps=5")
    args = arguments(program, *options, "--steps=5")
    ours = program.step.configuration(program.step_options(args, tmp_path), tmp_path)
    converted = convert(theirs, "verl").tree
    for section, names in (
        ("data", ("train_batch_size", "max_prompt_length", "max_response_length")),
        ("actor", ("ppo_mini_batch_size", "optim")),
        ("rollout", ("n",)),
        ("trainer", ("total_steps",)),
    ):
        assert {name: converted[section][name] for name in names} == {
            name: ours[section][name] for name in names
        }
    assert converted.get("algorithm", {}).get("adv_estimator") == "grpo"
    assert theirs["data.train_batch_size"] // theirs["actor_rollout_ref.actor.ppo_mini_batch_size"] == 3
    assert theirs["actor_rollout_ref.rollout.dtype"] == ours["model"]["dtype"] == "bfloat16"
    kl = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    assert [theirs[name] for name in kl] == [False, False]
    assert theirs["trainer.n_gpus_per_node"] == 2


def test_paceline_loads_the_weights_that_verl_loads(program: ModuleType, tmp_path: Path) -> None:
    options = program.step_options(arguments(program, "actor.optim.lr=2e-6"), tmp_path)
    command = program.step.train_command(options, tmp_path / "config.yaml")
    assert command[-2:] == ["model.load_format=auto", "actor.optim.lr=2e-6"]
    assert "trainer.total_steps=5" in command  # four, and the one before which it is stopped
    assert options.placement == "auto"
    assert settings(program, tmp_path)["actor_rollout_ref.model.path"] == str(tmp_path / "model")


def test_values_are_written_in_hydras_grammar(program: ModuleType) -> None:
    values = {"a": True, "b": ["console"], "c": 1e-06, "d": "/data/model-3B", "e": "/my data/x=1", "f": -1}
    assert program.verl_side.hydra_overrides(values) == [
        "a=true",
        "b=[console]",
        "c=1e-06",
        "d=/data/model-3B",
        "e='/my data/x=1'",
        "f=-1",
    ]


def test_steps_are_read_from_verls_output(program: ModuleType) -> None:
    steps = program.verl_side.read_steps(OUTPUT + "\n")
    assert [step["step"] for step in steps] == [2, 3]
    expected = {"timing_s/gen": 10.12, "timing_s/step": 28.1, "actor/lr": 1e-06, "num_turns/min": 2.0}
    assert {name: steps[0][name] for name in expected} == expected
    assert steps[1] == {"step": 3, "timing_s/step": 27.5, "timing_s/gen": 9.0}
    assert [step["step"] for step in program.verl_side.read_steps(OUTPUT)] == [2], (
        "the last line is incomplete"
    )


def test_verl_tokenizes_the_prompts_to_the_same_ids(program: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    args = arguments(program, "--shape=tiny", "--prompts=2", "--prompt-tokens=12", "--steps=2")
    program.step.write_inputs(program.step_options(args, tmp_path), tmp_path)
    vocab_size = program.SHAPES["tiny"]["vocab_size"]
    program.verl_side.write_inputs(tmp_path, vocab_size)
    ours = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "verl_tokenizer")
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    rows = parquet.read_table(tmp_path / "prompts.parquet").to_pylist()
    assert len(rows) == len(prompts) == 6
    for prompt, row in zip(prompts, rows, strict=True):
        ids = theirs.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert len(ids) == 12
        assert ids == ours(prompt)["input_ids"]
        assert row["reward_model"]["ground_truth"] == "0"
    # What verl's prompt builder for Qwen asks for, and the number of tokens that its engine may sample.
    assert theirs.encode("\n", add_special_tokens=False) == [vocab_size - 2]
    assert theirs.convert_tokens_to_ids("<|im_end|>") == vocab_size - 1
    assert len(theirs) == vocab_size
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_token_id, ours.pad_token_id)


def test_the_reward_is_the_same_function(program: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(program.step.REWARD + program.verl_side.REWARD)
    names: dict[str, Any] = {}
    exec((tmp_path / "reward.py").read_text(), names)
    score = names["compute_score"](
        data_source="even_words", solution_str="w1 w2 w4 w7", ground_truth="0", extra_info={}
    )
    assert score == names["even_words"]("w1 w2 w4 w7", "0") == 0.5


def test_drawn_weights_are_those_of_the_shape(program: ModuleType, tmp_path: Path) -> None:
    from safetensors import safe_open

    args = arguments(program, "--shape=tiny", "--steps=2")
    program.step.write_inputs(program.step_options(args, tmp_path), tmp_path)
    config = (tmp_path / "model" / "config.json").read_text()
    program.write_weights(tmp_path / "model", tmp_path / "weights")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
    assert (tuple(embedding.shape), str(embedding.dtype)) == ((1024, 128), "torch.bfloat16")
    assert 0.015 < float(embedding.float().std()) < 0.025
    assert (tmp_path / "model" / "config.json").read_text() == config
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompts", "33"], "must be a multiple of --mini-batches 2"),
        (["--steps", "1"], "the first step is not counted"),
        (["--prompts", "2", "--samples", "3"], "pad mini-batches of 3 samples on 2 GPUs"),
        (["--shape", "135M"], "is none of tiny"),
        (["--rounds", "0"], "both must be at least 1"),
    ],
)
def test_arguments_that_would_not_compare(
    program: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        arguments(program, *options)
    assert said in capsys.readouterr().err


def test_the_first_visible_gpus_are_used(program: ModuleType) -> None:
    assert program.gpu_list(2, None) == "0,1"
    assert program.gpu_list(2, "3,5,6") == "3,5"
    with pytest.raises(program.SideError, match="CUDA_VISIBLE_DEVICES=3; name fewer"):
        program.gpu_list(2, "3")


class Stage:
    """Both sides as stand-ins, and what they were called with."""

    def __init__(self, program: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program, self.folder, self.work = program, folder, folder / "work"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
        monkeypatch.setenv("PYTHONPATH", "/of/paceline")
        monkeypatch.setattr(program, "POLL_S", 0.05)
        monkeypatch.setattr(program, "STOP_TIMEOUT_S", 5.0)
        monkeypatch.setattr(program, "ORPHAN_TIMEOUT_S", 0.2)
        monkeypatch.setattr(program, "write_weights", lambda model, scratch: None)
        monkeypatch.setattr(program.step, "train_command", self._paceline)
        self.paceline_s = [9.0, 2.0, 3.0, 2.5]
        self.last_words = "time.sleep(600)"
        self.prompt_tokens, self.verl_s, self.version = 32.0, [20.0, 6.0, 5.0, 4.0], '"0.9.1"'

    def _paceline(self, options: argparse.Namespace, config: Path) -> list[str]:
        assert config == self.work / "config.yaml"
        metrics = str(self.work / "run" / "metrics.jsonl")
        return [sys.executable, "-c", FAKE_PACELINE, metrics, json.dumps(self.paceline_s)]

    def run(self, *options: str) -> int:
        path = self.folder / "python"
        path.write_text(
            FAKE_VERL.format(
                python=sys.executable,
                version=self.version,
                folder=str(self.folder),
                seconds=self.verl_s,
                prompt_tokens=self.prompt_tokens,
                last=self.last_words,
            )
        )
        path.chmod(0o755)
        sizes = ["--shape=tiny", "--prompts=4", "--samples=2", "--prompt-tokens=32", "--response-tokens=16"]
        command = ["--verl", str(path), "--gpus=2", f"--work={self.work}", *sizes, *options]
        code: int = self.program.main(command)
        return code

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    def children(self) -> list[int]:
        return [int(line) for line in (self.folder / "children").read_text().splitlines()]


@pytest.fixture
def stage(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(program, tmp_path, monkeypatch)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_sides_alternate_and_the_ratio_is_that_of_tokens(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(stage.program.records, "keep", lambda *row, **more: kept.append((row, more)))
    assert stage.run("--rounds=2", "--verl-set=data.seed=1", "--record=3B on two") == 0
    out = capsys.readouterr().out
    rows = [cells(line) for line in out.splitlines() if line.startswith(("| 0", "| 1"))]
    version = importlib.metadata.version("paceline")
    assert [row[:2] for row in rows] == [
        ["0", f"Paceline {version}"],
        ["0", "verl 0.9.1"],
        ["1", "verl 0.9.1"],
        ["1", f"Paceline {version}"],
    ]
    tokens = 4 * 2 * (32 + 16)
    ours, theirs = statistics.median([2.0, 3.0, 2.5]), statistics.median([6.0, 5.0, 4.0])
    assert rows[0][3:] == ["2.50", "1.25", "0.10", "0.62", "48.0", f"{tokens / ours / 2:.0f}", ""]
    assert rows[1][3:] == ["5.00", "1.25", "0.62", "2.50", "48.0", f"{tokens / theirs / 2:.0f}", "2.00"]
    beside = ("verl 0.9.1, in turn", tokens / theirs / 2)
    assert kept[0][0] == ("steps", "3B on two", tokens / ours / 2)
    assert (kept[0][1]["beside"], kept[0][1]["ratio"]) == (beside, 2.0)
    assert rows[2][-1] == ""
    assert rows[3][-1] == "2.00"
    assert "tokens/s per GPU, Paceline / verl: 2.00;" in out
    assert "verl: verl 0.9.1, torch 2.11.0, vllm 0.24.0, transformers missing" in out
    for call in stage.calls():
        assert call["argv"][:2] == ["-m", "verl.trainer.main_ppo"]
        assert call["argv"][-1] == "data.seed=1"
        assert call["seen"] == ["4,5", None, None]
        assert call["cwd"] == str(stage.work / "verl_run")
    assert len(stage.calls()) == 2


def test_verl_with_flash_attn_4_loads_the_module_for_it(stage: Stage) -> None:
    assert stage.run("--rounds=1", "--verl-set=a.attn_implementation=flash_attention_4") == 0
    (call,) = stage.calls()
    assert call["seen"][1:] == [str(stage.program.verl_side.MODULES), "verl_flash4"]


def test_nothing_of_a_side_stays_on_the_gpus(stage: Stage) -> None:
    """verl's children are in sessions of their own, and it does not end them itself."""
    assert stage.run("--rounds=1") == 0
    assert len(stage.children()) == 1
    assert not any(psutil.pid_exists(pid) for pid in stage.children())


def test_a_side_that_fails_shows_the_end_of_its_log(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.verl_s = [6.0]
    stage.last_words = "print('CUDA out of memory'); time.sleep(1); sys.exit(3)"
    assert stage.run("--rounds=1") == 1
    captured = capsys.readouterr()
    assert "| 0 | Paceline" in captured.out
    assert "CUDA out of memory" in captured.err
    assert "verl ended with 3 after 1 of 4 steps" in captured.err
    assert f"its log: {stage.work}/verl-0.log" in captured.err
    assert "--verl-set KEY=VALUE" in captured.err
    assert not any(psutil.pid_exists(pid) for pid in stage.children())


def test_a_side_that_hangs_ends_at_its_deadline(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.paceline_s = [1.0, 1.0]
    began = time.monotonic()
    assert stage.run("--rounds=1", "--deadline=1") == 1
    assert 1.0 < time.monotonic() - began < 20.0
    assert "Paceline did 2 of 4 steps within --deadline 1 s" in capsys.readouterr().err
    assert not (stage.folder / "calls.jsonl").exists(), "verl was not started"


def test_the_seconds_before_the_first_step_are_counted(stage: Stage) -> None:
    side = stage.program.Side(
        name="Paceline",
        command=[sys.executable, "-c", "import time; time.sleep(1); print('step'); time.sleep(600)"],
        cwd=stage.folder,
        environment=dict(os.environ),
        log=stage.folder / "log",
        steps=lambda: [{"timing_s/step": 9.0}] if "step" in (stage.folder / "log").read_text() else [],
        num_tokens=lambda line: 1.0,
        remedy="",
    )
    start_s, steps = stage.program.run(side, 1, 20.0)
    assert -8.0 <= start_s < -2.0  # a second until its line, of which the step would have taken nine
    assert steps == [{"timing_s/step": 9.0}]


def test_other_work_is_no_comparison(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.prompt_tokens = 30.0
    assert stage.run("--rounds=1") == 1
    assert "verl's samples have 46.0 tokens instead of 48" in capsys.readouterr().err


def test_an_environment_without_verl(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.version = "None"
    assert stage.run("--rounds=1") == 1
    assert "has no verl; install verl there" in capsys.readouterr().err


def test_a_python_that_is_not_there(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--verl", "/no/such/python", "--gpus=1"]) == 1
    assert "/no/such/python does not start" in capsys.readouterr().err
