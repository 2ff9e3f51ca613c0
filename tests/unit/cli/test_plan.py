"""Which processes a run has, who gets which cores and GPUs, and the dry run that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.launch.planning import dry_run, plan
from paceline.sizing.gpus import gpus_to_share
from paceline.sizing.machine import Machine
from paceline.sizing.placement import settle
from support import source
from support.cli_configs import config


def test_a_cpu_run_shares_the_cores() -> None:
    machine = Machine(num_cores=8, gpus=())
    told = config(
        learner={"world_size": 2}, rollout={"replicas": 2}, actor={"ppo_max_token_len_per_gpu": 2048}
    )
    specs = {s.name: s for s in plan.members(told, machine, controller_address="h:1", master_port=29)}
    assert list(specs) == ["rollout-0", "rollout-1", "learner-0", "learner-1", "reward"]
    assert specs["learner-1"].env["OMP_NUM_THREADS"] == "4"
    ranks = {k: specs["learner-1"].env[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    assert ranks == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29"}
    assert "CUDA_VISIBLE_DEVICES" not in specs["rollout-0"].env
    assert specs["rollout-1"].command[3:] == (
        "--controller", "h:1", "--member-id", "rollout-1", "--host", "127.0.0.1",
    )  # fmt: skip


def test_gpus_go_to_the_learner_first_and_the_rest_to_the_engines_in_order() -> None:
    machine = Machine(num_cores=32, gpus=tuple(range(8)))
    told = config(learner={"world_size": 4}, rollout={"replicas": 2, "tensor_model_parallel_size": 2})
    specs = {s.name: s for s in plan.members(told, machine, controller_address="h:1", master_port=29)}
    devices = {name: spec.env.get("CUDA_VISIBLE_DEVICES") for name, spec in specs.items()}
    assert devices == {
        "rollout-0": "4,5",
        "rollout-1": "6,7",
        "learner-0": "0,1,2,3",
        "learner-1": "0,1,2,3",
        "learner-2": "0,1,2,3",
        "learner-3": "0,1,2,3",
        "reward": None,
    }


def test_the_last_servers_validate_and_count_among_the_replicas() -> None:
    files = {"train_files": "t.parquet", "val_files": "v.parquet"}
    told = config(data=files, rollout={"replicas": 3, "validation_servers": 1}, learner={"world_size": 1})
    machine = Machine(num_cores=32, gpus=tuple(range(5)))
    specs = {s.name: s for s in plan.members(told, machine, controller_address="h:1", master_port=29)}
    assert [name for name, spec in specs.items() if "--validates" in spec.command] == ["rollout-2"]
    assert specs["rollout-2"].env["CUDA_VISIBLE_DEVICES"] == "3"
    further = {s.name: s for s in plan.newcomers(told, machine, controller_address="h:1")}
    assert "--validates" not in further["rollout-3"].command
    settled = settle(told, Machine(num_cores=4, gpus=()))
    assert "3 rollout servers (1 for validation) on 4 CPU cores" in settled.remarks[-1]


def test_replicas_of_reward_models_attach_to_the_reward_service_and_keep_their_gpus() -> None:
    told = config(
        reward={"models": [{"name": "rm", "path": "judge", "device": "cuda:1", "replicas": 2}]},
        service={"reward_port": 4711},
    )
    machine = Machine(num_cores=8, gpus=(0, 1, 2, 3))
    specs = {s.name: s for s in plan.members(told, machine, controller_address="h:1", master_port=29)}
    replicas = [spec for spec in specs.values() if spec.role is plan.Role.REWARD_MODEL]
    assert [spec.name for spec in replicas] == ["reward-model-rm-0", "reward-model-rm-1"]
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in replicas] == ["1", "2"]
    assert replicas[1].command[1:] == (
        "-m", "paceline.reward.models", "judge", "--attach", "127.0.0.1:4711", "--name", "rm",
        "--kind", "sequence_classification", "--engine", "transformers", "--step-separator", "\n",
        "--device", "cuda:0", "--dtype", "float32", "--max-batch-tokens", "16384",
        "--timeout", "120.0", "--load-timeout", "600.0",
    )  # fmt: skip
    assert replicas[0].token_variable == "PACELINE_REWARD_TOKEN"
    others = {name: specs[name].env["CUDA_VISIBLE_DEVICES"] for name in ("learner-0", "rollout-0")}
    assert others == {"learner-0": "0", "rollout-0": "3"}
    assert specs["reward"].command[-2:] == ("--port", "4711")


def test_a_model_on_the_only_gpu_shares_it() -> None:
    told = config(reward={"models": [{"name": "rm", "path": "judge", "device": "cuda:0"}]})
    assert gpus_to_share(told, (0,)) == (0,)


def test_an_error_for_too_few_gpus_says_what_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"need 2 GPUs, 1 are left beside the learner's \(0\)"):
        plan.share_gpus(config(rollout={"replicas": 2}), (0, 1))
    with pytest.raises(ConfigError, match="learner.world_size=2 needs as many GPUs, there are 1"):
        plan.share_gpus(config(learner={"world_size": 2, "devices": [3]}), (0, 1, 2, 3))


def test_a_dry_run_shows_each_service_its_sections_and_no_secret() -> None:
    text = dry_run.describe(
        config(broker={"url": "redis://:hunter2@10.0.0.1:6379/0"}), Machine(num_cores=2, gpus=())
    )
    assert "hunter2" not in text
    assert "redis://***@10.0.0.1:6379/0" in text
    for service in ("controller", "rollout-0", "learner-0", "reward"):
        assert f"== {service}\n" in text
    reward = yaml.safe_load(text.rpartition("== reward")[2].split("\n", 3)[3])
    assert sorted(reward) == ["broker", "model", "reward", "service", "telemetry"]
    assert set(plan.SECTIONS) == {"controller", "rollout", "learner", "reward", "reward-model"}
    assert {name for names in plan.SECTIONS.values() for name in names} == set(RunConfig.model_fields)


@pytest.mark.parametrize(
    "own",
    [
        {"algorithm": {"adv_estimator": "my.py:f"}},
        {"algorithm": {"type": "custom", "path": "my.py:Own"}},
        {"actor": {"policy_loss": {"type": "custom", "path": "my.py:loss"}}},
    ],
)
def test_what_is_the_users_own_is_checked_while_the_controller_starts(
    own: dict[str, object], tmp_path: Path
) -> None:
    def roles(**changes: object) -> list[str]:
        specs = plan.checks(config(**changes), tmp_path)
        for spec in specs:
            module, name = spec.command[2:4]
            text = source.modules()[module].read_text(encoding="utf-8")
            assert f'"{name}": _' in text.partition("CHECKS")[2], f"{module} has no check {name}"
        return [spec.name for spec in specs]

    assert roles() == ["reward-check"]
    assert roles(**own) == ["reward-check", "learner-check"]
