"""`paceline convert-config`: whole files of verl and TRL, with sizes and rates computed from both sides."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.convert.convert import convert
from paceline.cli.convert.rules import DEVICES, NUM_ROWS
from paceline.cli.convert.sources.shell_script import read_script
from paceline.cli.main import main
from paceline.config.load import load, parse
from paceline.config.run import RunConfig

GSM8K = """#!/usr/bin/env bash
set -xeuo pipefail
# The trainer's own words: actor_rollout_ref.rollout.n=99 stands in a comment.
DATA_DIR=${DATA_DIR:-@DIR@}
MODEL_PATH=${MODEL_PATH:-"${DATA_DIR}/a model"}
response=$((1024 * 2 - 1024))
n=5
LOGGING=(
    trainer.logger='["console","wandb"]'   # two of them
    trainer.project_name='verl_grpo'
)
if [ "${FAST:-0}" != 0 ]; then
    n=2
fi
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=${DATA_DIR}/train.jsonl \\
    data.train_batch_size=64 \\
    data.max_response_length=$response \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path="$MODEL_PATH" \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    actor_rollout_ref.rollout.n=$n \\
    "${LOGGING[@]}" \\
    +actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \\
    trainer.save_freq=-1 \\
    trainer.default_local_dir=$NOWHERE/x \\
    trainer.total_epochs=15 "$@" 2>&1 | tee log.txt
"""
TRL_SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
from mine.rewards import brevity

raise SystemExit("a converter must not run this")
layers = "all-linear"
layers = [layers]
SIZE = 16

def near_twenty(completions, solution, level=None, **kwargs):
    return [-abs(20 - len(c[0]["content"])) for c in completions]

dataset = load_dataset("org/maths", "hard")
dataset = dataset.filter(lambda row: row["level"] > 2)
dataset = dataset["train"]
args = GRPOConfig(
    output_dir="runs/out", per_device_train_batch_size=SIZE, gradient_accumulation_steps=2,
    learning_rate=2e-6, max_steps=101, num_iterations=2, save_steps=20, seed=int("3"),
)
trainer = GRPOTrainer(
    model="org/model", args=args, train_dataset=dataset,
    reward_funcs=[accuracy_reward, near_twenty, brevity, lambda completions: [0.0]],
    peft_config=LoraConfig(target_modules=layers),
)
trainer.train()
"""


def command(folder: Path, name: str, text: str, *options: str) -> tuple[str, RunConfig]:
    (folder / name).write_text(text)
    out = folder / "ours.yaml"
    assert main(["convert-config", str(folder / name), "--out", str(out), *options]) == 0
    return out.read_text(), load(RunConfig, out)


def group(text: str, title: str) -> str:
    return text.partition(f"# {title}:")[2].partition("\n\n")[0]


def test_verls_gsm8k_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1"}) * 1 + "\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n' * 200)
    text, ours = command(tmp_path, "run.sh", GSM8K.replace("@DIR@", str(tmp_path)))
    actor = ours.actor
    # verl: epochs of whole batches, each cut into mini-batches of prompts, each with n samples.
    rows, batch, mini, epochs = 200, 64, 16, 15
    assert ours.with_epochs_counted(rows).trainer.total_steps == epochs * (rows // batch)
    assert ours.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs == batch // mini
    assert actor.ppo_mini_batch_size * ours.rollout.n == mini * 5
    assert (actor.optim.lr, actor.optim.weight_decay, actor.optim.lr_scheduler) == (1e-6, 0.01, "constant")
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.001, "low_var_kl")
    assert actor.loss_arguments == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip_c": 3.0}
    assert actor.memory.offload_reference
    assert ours.model.path == f"{tmp_path}/a model"
    assert (ours.data.max_response_length, ours.data.max_prompt_length) == (1024, 512)
    assert (ours.data.overlong_prompts, ours.data.ground_truth_key) == ("filter", "reward_model.ground_truth")
    assert (ours.trainer.save_freq, ours.trainer.test_freq) == (0, 0)
    assert list(ours.trainer.loggers) == ["wandb"]
    assert [f.name for f in ours.reward.functions] == ["gsm8k", "math_verify"]
    assert "# A step: 64 prompts with 5 samples each; 4 updates of 80 samples." in text
    assert "actor_rollout_ref.rollout.n: 5  ->  rollout.n: 5" in group(text, "The same")
    assert "custom_reward_function.path: None (its default)" in group(text, "Changed, and why")
    assert re.search(r"default_local_dir=\$NOWHERE.*does not set NOWHERE", group(text, "Cannot be"))
    assert "ppo_micro_batch_size_per_gpu: 8" in text.partition("# These keys change no number")[2]


def test_a_script_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, ours = command(tmp_path, "train.py", TRL_SCRIPT, "--devices", "3")
    assert capsys.readouterr().err == ""
    # 16 x 3 x 2 samples of 8 each; used twice; 101 updates are 51 steps of two.
    assert (ours.data.train_batch_size, ours.actor.ppo_mini_batch_size, ours.actor.ppo_epochs) == (12, 12, 2)
    assert (ours.trainer.total_steps, ours.trainer.save_freq) == (51, 10)
    assert list(ours.data.train_files) == ["org/maths:hard:train"]
    assert (ours.model.path, ours.trainer.run_dir) == ("org/model", "runs/out")
    assert ours.model.lora is not None
    assert (ours.model.lora.rank, ours.model.lora.alpha, ours.model.lora.targets) == (8, 8.0, ("all",))
    functions = [(f.name, f.group, f.kwargs) for f in ours.reward.functions]
    assert functions == [
        ("math_verify", False, {}),
        ("rewards.py:near_twenty", True, {"completions": "messages"}),
        ("mine.rewards:brevity", True, {"completions": "messages"}),
    ]
    assert (ours.data.ground_truth_key, list(ours.data.extra_keys)) == ("solution", ["solution", "level"])
    optim = ours.actor.optim
    assert (optim.lr, optim.lr_scheduler, optim.weight_decay) == (2e-6, "linear", 0.0)
    assert (ours.actor.aggregation, ours.actor.loss_arguments["dual_clip_c"]) == ("token-mean", None)
    changed, refused = group(text, "Changed, and why"), group(text, "Cannot be")
    assert "max_steps: 101  ->  trainer.total_steps: 51" in changed
    assert "train_dataset: filter" in changed
    assert "move the function from train.py to rewards.py" in changed
    assert "seed: int('3')" in refused
    assert "lambda completions" in refused


class Simulated:
    """TRL's loop over micro-steps, as its documentation tells it: what is drawn when, and who updates."""

    def __init__(
        self, batch: int, devices: int, accumulated: int, per_generation: int, iterations: int
    ) -> None:
        self.generations = self.updates = 0
        self.samples_of_update = batch * devices * accumulated
        self.samples_of_generation = batch * devices * per_generation
        for micro_step in range(per_generation * iterations * accumulated):
            self.generations += micro_step % (per_generation * iterations) == 0
            self.updates += (micro_step + 1) % accumulated == 0


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(("accumulated", "per_generation"), [(1, None), (4, None), (2, 8), (4, 4), (8, 2)])
@pytest.mark.parametrize("iterations", [1, 3])
def test_trls_batches(devices: int, accumulated: int, per_generation: int | None, iterations: int) -> None:
    theirs: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "gradient_accumulation_steps": accumulated,
        "num_iterations": iterations,
        "max_steps": 960,
    }
    theirs |= {} if per_generation is None else {"steps_per_generation": per_generation}
    converted = convert(theirs, "trl", {DEVICES: devices})
    steps = per_generation or accumulated
    if accumulated % steps == 0 and steps < accumulated and iterations > 1:
        assert any("mix samples of several policies" in why for why in converted.refused.values())
        return
    real = Simulated(8, devices, accumulated, steps, iterations)
    ours = converted.tree
    n, batch = ours["rollout"]["n"], ours["data"]["train_batch_size"]
    actor = ours["actor"]
    assert actor["ppo_mini_batch_size"] * n == real.samples_of_update
    # A step here takes in as many samples as were drawn for as many updates.
    updates = batch // actor["ppo_mini_batch_size"] * actor.get("ppo_epochs", 1)
    assert batch * n * real.updates == real.samples_of_generation * real.generations * updates
    assert ours["trainer"]["total_steps"] * updates == 960


def test_trls_epochs_are_counted_as_there() -> None:
    theirs = {"per_device_train_batch_size": 8, "num_generations": 4, "num_train_epochs": 2.5}
    tree = convert({**theirs, "model": "m", "dataset_name": "t.jsonl"}, "trl").tree
    assert tree["data"]["train_batch_size"] == 2
    assert tree["trainer"]["total_epochs"] == 2.5
    needed: dict[str, Any] = {"reward": {"functions": [{"name": "gsm8k"}]}, "model": {"path": "m"}}
    ours = parse(RunConfig, needed | {key: value for key, value in tree.items() if key not in needed})
    assert ours.with_epochs_counted(101).trainer.total_steps == math.ceil(2.5 * (101 // 2))
    # There two generations of two prompts make an update, and the last one of an epoch may have but one.
    theirs |= {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    converted = convert(theirs, "trl", {NUM_ROWS: 103})
    assert converted.tree["trainer"]["total_steps"] == math.ceil(2.5 * math.ceil((103 // 2) / 2))
    unknown = convert(theirs, "trl")
    assert "trainer.total_steps is 2.5 x (rows // 4)" in unknown.refused["max_steps: -1 (its default)"]


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"per_device_train_batch_size": 6}, "no whole groups of num_generations=8"),
        (
            {"per_device_train_batch_size": 4, "steps_per_generation": 4},
            "raise gradient_accumulation_steps to 2",
        ),
        ({"generation_batch_size": 20}, "not a multiple of the 8 samples"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "are both set"),
    ],
)
def test_batches_that_cannot_be(theirs: dict[str, Any], why: str) -> None:
    refused = convert(theirs, "trl").refused
    assert any(why in reason for reason in refused.values()), refused


def test_references_of_a_composed_file() -> None:
    converted = convert(
        {
            "actor_rollout_ref": {
                "actor": {"ppo_epochs": 3, "ppo_mini_batch_size": "${oc.select:nothing.here,32}"},
                "rollout": {"n": "${actor_rollout_ref.actor.ppo_epochs}", "name": "???"},
            },
            "critic": {"ppo_epochs": "${oc.select:actor_rollout_ref.actor.ppo_epochs,1}"},
            "trainer": {
                "project_name": "p",
                "experiment_name": "e",
                "default_local_dir": "checkpoints/${trainer.project_name}/${.experiment_name}",
                "max_actor_ckpt_to_keep": "${no.such.key}",
            },
        },
        "verl",
    )
    assert converted.tree["rollout"]["n"] == converted.tree["critic"]["ppo_epochs"] == 3
    assert converted.tree["actor"]["ppo_mini_batch_size"] == 32
    assert converted.tree["trainer"]["run_dir"] == "checkpoints/p/e"
    assert "trainer.max_actor_ckpt_to_keep: ${no.such.key}" in converted.refused


@pytest.mark.parametrize("loss", ["sapo", "geo_mean", "gspo"])
def test_losses_of_which_verl_takes_the_mean_over_sequences(loss: str) -> None:
    actor = "actor_rollout_ref.actor"
    converted = convert(
        {f"{actor}.policy_loss.loss_mode": loss, f"{actor}.loss_agg_mode": "token-mean"}, "verl"
    )
    assert converted.tree["actor"].get("loss_agg_mode") is None


def test_words_of_a_shell_script() -> None:
    script = read_script(
        "A='x $B'; export B=\"q\\$\"\n"
        'python -m verl.trainer.main_ppo a.one=$A a.two="$B z" ++a.three=[1,2] a.four=null a.five=-1 '
        "a.six=${C:-$((2**1)) } ~a.five a.seven=$(date) a.eight='' a.nine=${D:-fallback}\n"
        "echo -m verl a.one=no\n",
        {},
    )
    assert script.settings == {
        "a.one": "x $B",
        "a.two": "q$ z",
        "a.three": [1, 2],
        "a.four": None,
        "a.eight": None,
        "a.nine": "fallback",
    }
    assert len(script.refused) == 2, "a power and a command"


def test_a_variable_without_quotes_becomes_words() -> None:
    script = read_script(
        'N=3\nACTOR="\n  actor.n=$N \\\n  actor.name=${NAME:-"${N}x"}\n"\n'
        "python3 -m verl.trainer.main_ppo $ACTOR data.files=${N}.parquet actor@a=megatron\n",
        {},
    )
    assert script.settings == {
        "actor.n": 3,
        "actor.name": "3x",
        "data.files": "3.parquet",
        "model_engine": "megatron",
    }


def test_what_is_no_such_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, words in (
        ("x.yaml", "a: [", "is not YAML"),
        ("x.yaml", "a: 1\na: 2", "x.yaml: the key a is in line 1 and again in line 2"),
        ("x.yaml", "- 1", "holds no mapping"),
        ("x.yaml", "a: 1", "name the program with --from"),
        ("x.yaml", "model: {}\nreward: {}", "a configuration of Paceline already"),
        ("x.sh", "echo hello", "which starts verl's trainer"),
        ("x.py", "print(", "is not Python: line 1"),
        ("x.py", "print()", "neither GRPOConfig"),
    ):
        (tmp_path / name).write_text(text)
        assert main(["convert-config", str(tmp_path / name)]) == 2
        assert re.search(words, capsys.readouterr().err)
    (tmp_path / "x.yaml").write_text("num_generations: 8")
    assert main(["convert-config", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "x.yaml")]) == 2
    assert "exists" in capsys.readouterr().err
