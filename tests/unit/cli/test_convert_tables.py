"""`paceline convert-config`: every row of the tables, and every key of the other programs."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.convert.convert import TABLES, convert, default_of, flattened
from paceline.cli.convert.rules import UNSET, ConversionRule
from paceline.config.load import parse
from paceline.config.run import RunConfig
from support import source

# The examples that the docs show.
EXAMPLES = yaml.safe_load((source.ROOT / "tools" / "conversion_examples.yaml").read_text(encoding="utf-8"))
ROWS = [
    pytest.param(program, rule, theirs, ours, id=f"{program}-{'+'.join(map(str, theirs.items()))}")
    for program, rules in TABLES.items()
    for rule in rules
    for theirs, ours in EXAMPLES[program].get(rule.keys[0], ())
]
# TRL 1.10: GRPOConfig's own fields, its scripts' arguments, and those that TRL sets of transformers'.
TRL_KEYS = """
model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32
remove_unused_columns num_generations num_generations_eval max_completion_length ds3_gather_for_generation
shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p
generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode
vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high sapo_temperature_neg
sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level
reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model
ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy
entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions
log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
vllm_importance_sampling_cap max_prompt_length model_name_or_path model_revision dtype attn_implementation
use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save
lora_task_type use_rslora use_dora load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant
bnb_4bit_quant_storage dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming
ignore_bias_buffers datasets reward_model_name_or_path reward_funcs
"""
# verl 0.9, composed; of sections that are covered as a whole one key each.
VERL_KEYS = """
actor_rollout_ref.actor optim.optimizer optim.optimizer_impl optim.lr optim.lr_warmup_steps_ratio
optim.total_training_steps optim.weight_decay optim.lr_warmup_steps optim.betas optim.clip_grad
optim.min_lr_ratio optim.num_cycles optim.lr_scheduler_type optim.warmup_style
optim.override_optimizer_config optim.zero_indexed_step fsdp_config.param_offload
fsdp_config.optimizer_offload fsdp_config.offload_policy fsdp_config.model_dtype fsdp_config.dtype
fsdp_config.fsdp_size rollout_n strategy ppo_mini_batch_size ppo_micro_batch_size
ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu clip_ratio clip_ratio_low
clip_ratio_high tau_pos tau_neg freeze_vision_tower policy_loss.loss_mode policy_loss.clip_cov_ratio
policy_loss.clip_cov_lb policy_loss.clip_cov_ub policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef
policy_loss.dro_beta clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff calculate_entropy use_kl_loss
use_prefix_grouper use_torch_compile kl_loss_coef kl_loss_type ppo_epochs shuffle data_loader_seed
checkpoint.save_contents use_fused_kernels profiler.enable router_replay.mode router_replay.record_file
qat.enable grad_clip ulysses_sequence_parallel_size entropy_from_logits_with_chunking
entropy_from_logits_chunk_size entropy_checkpointing pad_to_length use_remove_padding calculate_sum_pi_squared
| actor_rollout_ref.ref log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz fsdp_config.param_offload
fsdp_config.strategy strategy
| actor_rollout_ref.rollout name mode nnodes n_gpus_per_node temperature top_k top_p full_determinism seed
prompt_length response_length dtype gpu_memory_utilization ignore_eos enforce_eager cudagraph_capture_sizes
free_cache_engine tensor_model_parallel_size data_parallel_size expert_parallel_size
pipeline_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs enable_chunked_prefill
enable_prefix_caching logprobs_mode scheduling_policy load_format layered_summon log_prob_micro_batch_size
log_prob_use_dynamic_bsz disable_log_stats do_sample n over_sample_rate multi_stage_wake_up
engine_kwargs.a val_kwargs.top_k val_kwargs.top_p val_kwargs.temperature val_kwargs.n val_kwargs.do_sample
multi_turn.enable multi_turn.format calculate_log_probs agent.num_workers agent.default_agent_loop
agent.agent_loop_config_path checkpoint_engine.backend trace.backend skip_tokenizer_init
enable_rollout_routing_replay moe_load_balance_metrics_interval profiler.tool prometheus.enable quantization
quantization_config_file mtp qat disaggregation.enabled
| actor_rollout_ref.model path hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template
external_lib override_config enable_gradient_checkpointing enable_activation_offload use_remove_padding
lora_rank lora_alpha target_modules exclude_modules lora_adapter_path use_liger use_fused_kernels
fused_kernel_options.impl_backend tiled_mlp.enabled mtp.enable mtp.method lora.type lora.rank lora.alpha
lora.dropout lora.target_modules lora.adapter_path
| data tokenizer use_shm train_files val_files train_max_samples val_max_samples prompt_key reward_fn_key
max_prompt_length max_response_length train_batch_size gen_batch_size val_batch_size tool_config_path
return_raw_input_ids return_raw_chat return_full_prompt shuffle seed dataloader_num_workers image_patch_size
validation_shuffle filter_overlong_prompts filter_overlong_prompts_workers truncation image_key video_key
audio_key trust_remote_code custom_cls.path custom_cls.name return_multi_modal_inputs
apply_chat_template_kwargs mm_processor_kwargs
| critic optim.lr optim.weight_decay fsdp.param_offload model.path model.lora_rank rollout_n strategy enable
ppo_mini_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu
forward_max_token_len_per_gpu ppo_epochs shuffle cliprange_value loss_agg_mode loss_scale_factor
checkpoint.save_contents profiler.enable grad_clip ulysses_sequence_parallel_size data_loader_seed
| reward num_workers custom_reward_function.path custom_reward_function.name reward_manager.name
reward_manager.source reward_model.enable reward_model.model_path reward_model.rollout.name sandbox_fusion.url
| reward_model enable model.path reward_manager sandbox_fusion.url
| custom_reward_function path name
| algorithm rollout_correction.rollout_is rollout_correction.rollout_is_threshold
rollout_correction.rollout_rs rollout_correction.bypass_mode rollout_correction.loss_type gamma lam
adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl.type kl_ctrl.kl_coef
kl_ctrl.horizon kl_ctrl.target_kl filter_groups.enable filter_groups.metric filter_groups.max_num_gen_batches
use_pf_ppo pf_ppo.reweight_method pf_ppo.weight_pow
| distillation enabled n_gpus_per_node
| transfer_queue enable
| trainer balance_batch total_epochs total_training_steps project_name experiment_name logger
log_val_generations rollout_data_dir validation_data_dir nnodes n_gpus_per_node save_freq esi_redundant_time
resume_mode resume_from_path val_before_train val_only test_freq critic_warmup default_hdfs_dir
del_local_ckpt_after_load default_local_dir max_actor_ckpt_to_keep max_critic_ckpt_to_keep
ray_wait_register_center_timeout device use_v1 v1.trainer_mode v1.sampler.max_off_policy_threshold
| global_profiler tool
| ray_kwargs ray_init.num_cpus
| skip rollout.enable
"""


@pytest.mark.parametrize(("program", "rule", "theirs", "ours"), ROWS)
def test_each_row_becomes_what_it_says(
    program: str, rule: ConversionRule, theirs: dict[str, Any], ours: dict[str, Any] | None
) -> None:
    converted, nothing = convert(theirs, program), convert({}, program)
    said = {key for label in converted.refused for key in [label.partition(":")[0]]}
    if ours is None:
        assert said & theirs.keys(), "nothing says that it cannot be"
        assert set(flattened(converted.tree)) <= set(flattened(nothing.tree))
        return
    assert not said & theirs.keys() & set(rule.keys)
    tree = flattened(converted.tree)
    for path, value in ours.items():
        expected = flattened({path: value}) if isinstance(value, dict) else {path: value}
        assert {key: tree.get(key) for key in expected} == expected
    if not ours:
        assert converted.tree == nothing.tree
    needed: dict[str, Any] = {
        "data": {"train_files": "t.jsonl"},
        "model": {"path": "m"},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 9},
    }
    for section, values in converted.tree.items():
        needed[section] = needed.get(section, {}) | values
    # verl draws one sample per prompt where nothing is said, which estimators over groups refuse.
    needed["rollout"] = {"n": max(2, needed.get("rollout", {}).pop("n", 8))} | needed.get("rollout", {})
    parse(RunConfig, needed)


@pytest.mark.parametrize("program", TABLES)
def test_each_rule_that_changes_values_has_its_example_and_each_key_one_rule(program: str) -> None:
    rules = TABLES[program]
    assert {rule.keys[0] for rule in rules if rule.convert is not None} == EXAMPLES[program].keys()
    keys = [key for rule in rules for key in rule.keys]
    assert sorted({key for key in keys if keys.count(key) > 1}) == []
    for rule in rules:
        assert not (rule.part_of and rule.convert)
        if rule.part_of:
            assert any(rule.part_of in other.keys for other in rules if other.convert), rule.keys


def test_each_key_of_trl_is_known() -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = ast.parse(Path(spec.origin).with_name("training_args.py").read_text())
    (arguments,) = [
        node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    ]
    inherited = {
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert len(inherited) > 90
    assert unknown("trl", (inherited | set(TRL_KEYS.split())) - {"_n_gpu", "cast_lm_head_to_fp32"}) == []


def test_each_key_of_verl_is_known() -> None:
    keys = {
        f"{section}.{name}"
        for part in VERL_KEYS.split("|")
        for section, names in [(part.split()[0], part.split()[1:])]
        for name in names
    }
    assert unknown("verl", keys) == []


def unknown(program: str, keys: set[str]) -> list[str]:
    return sorted(key for key in keys if not any(rule.covers(key) for rule in TABLES[program]))


def test_a_key_that_no_rule_knows_cannot_be() -> None:
    converted = convert({"trainer.no_such_key": 5}, "verl")
    assert converted.refused["trainer.no_such_key: 5"].startswith("no such key is known")


def test_only_defaults_that_differ_from_ours_are_written() -> None:
    tree = flattened(convert({}, "trl").tree)
    assert tree["actor.optim.lr_scheduler"] == "linear"
    assert tree["actor.optim.weight_decay"] == 0.0
    assert "actor.optim.lr" not in tree
    assert default_of("actor.optim.lr") == 1e-6
    assert default_of("critic.optim.lr") == 1e-5
    assert default_of("model.lora.rank") == 16
    assert default_of("model.path") is UNSET
    assert all(default_of(path) != value for path, value in tree.items() if path != "actor.use_dual_clip")


@pytest.mark.parametrize("value", [None, -1])
def test_a_value_that_means_nothing_is_as_if_it_were_not_there(value: int | None) -> None:
    converted, nothing = convert({"data.val_max_samples": value}, "verl"), convert({}, "verl")
    assert (converted.tree, converted.refused) == (nothing.tree, nothing.refused)
