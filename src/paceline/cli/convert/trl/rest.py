"""Keys of TRL that have no counterpart, and those on which no number depends."""

from __future__ import annotations

from paceline.cli.convert.rules import ConversionRule, no_effect, only, optimizer, options, rule

_DECODING = "changes the sampled distribution, which the loss would have to account for"
_STEPS = "checkpoints are kept by their step, not by a metric"

REST: tuple[ConversionRule, ...] = (
    only(_DECODING, "top_p", neutral=(None, 1)),
    only(_DECODING, "top_k", neutral=(None, 0, -1)),
    only(_DECODING, "min_p", neutral=(None, 0)),
    only(_DECODING, "repetition_penalty", neutral=(None, 1)),
    only(_DECODING, "generation_kwargs generation_kwargs.*", neutral=(None,)),
    only(_DECODING, "vllm_structured_outputs_regex"),
    options("chat_template_kwargs", "data.chat_template_kwargs"),
    only("AdamW is the optimizer", "optim_args optim_target_modules"),
    rule(
        "optim",
        "`actor.optim.type`",
        optimizer(
            "actor.optim",
            exact=("adamw_torch", "adamw_torch_fused"),
            compact=("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"),
        ),
    ),
    only("call it vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    only("no response is left out for its length; see algorithm.overlong", "mask_truncated_completions"),
    only("the reference model stays as it is", "sync_ref_model"),
    no_effect("with `sync_ref_model`", "ref_model_mixup_alpha ref_model_sync_steps"),
    only("all tokens count; actor.policy_loss: clip_cov selects", "top_entropy_quantile", neutral=(None, 1)),
    only("the bonus for entropy has a fixed weight, actor.entropy_coeff", "use_adaptive_entropy"),
    no_effect(
        "with `use_adaptive_entropy`", "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
    no_effect(
        "with `loss_type: vespo`, which is not here",
        "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg",
    ),
    only("see algorithm.rollout_correction", "off_policy_mask_threshold"),
    only("see actor.kl_loss_type", "use_bias_correction_kl"),
    only(
        "reward.functions.N.normalize: batch comes near",
        "multi_objective_aggregation",
        neutral=("sum_then_normalize",),
    ),
    only(
        "write an environment; docs/environments.md",
        "max_tool_calling_iterations environment_factory tools rollout_func",
    ),
    only("float16 is not supported; see model.dtype", "fp16"),
    only("only linear layers have adapters", "lora_target_parameters lora_modules_to_save use_dora"),
    only("weights that train are not quantised", "load_in_8bit load_in_4bit quantization_config"),
    no_effect("with `load_in_4bit`", "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"),
    only(
        "`paceline export` writes the model; upload it with `hf upload`",
        "push_to_hub log_completions_hub_repo",
    ),
    no_effect(
        "with `push_to_hub`",
        "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
    ),
    only(_STEPS, "load_best_model_at_end"),
    no_effect(_STEPS, "metric_for_best_model greater_is_better"),
    only("not here", "label_smoothing_factor neftune_noise_alpha"),
    only("code of a model's repository is not run; see docs/models.md", "trust_remote_code"),
    only("rows are read from files at the start", "dataset_streaming"),
    only("name the files under data.train_files", "datasets datasets.*", neutral=(None,)),
    only(
        "set what it means here: model.dtype, model.path",
        "model_init_kwargs model_init_kwargs.*",
        neutral=(None,),
    ),
    only("TRL refuses it, too", "auto_find_batch_size"),
    only("name reward models under reward_funcs", "reward_model_name_or_path"),
    no_effect(
        "sizes of memory and kernels, which the memory plan chooses",
        "gradient_checkpointing gradient_checkpointing_kwargs gradient_checkpointing_kwargs.* "
        "use_liger_kernel liger_kernel_config attn_implementation torch_compile torch_compile_backend "
        "torch_compile_mode use_cache cache_implementation torch_empty_cache_steps pad_to_multiple_of tf32 "
        "bf16_full_eval fp16_full_eval use_transformers_paged use_transformers_continuous_batching "
        "transformers_continuous_batching_config transformers_continuous_batching_config.* "
        "per_device_eval_batch_size eval_accumulation_steps average_tokens_across_devices disable_dropout "
        "train_sampling_strategy",
    ),
    no_effect(
        "the launcher places servers and ranks: `placement`, `rollout.*`, `learner.*`",
        "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host "
        "vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
        "vllm_max_model_length vllm_tensor_parallel_size ds3_gather_for_generation fsdp fsdp_config "
        "fsdp_config.* deepspeed deepspeed.* accelerator_config accelerator_config.* parallelism_config "
        "parallelism_config.* ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_static_graph ddp_backend ddp_timeout local_rank use_cpu full_determinism",
    ),
    no_effect(
        "every run logs each step, and keeps its samples",
        "log_completions log_multimodal num_completions_to_print log_unique_prompts logging_strategy "
        "logging_first_step logging_nan_inf_filter log_on_each_node log_level log_level_replica disable_tqdm "
        "include_num_input_tokens_seen skip_memory_metrics debug project trackio_space_id trackio_bucket_id "
        "trackio_static_space_id",
    ),
    no_effect(
        "data, checkpoints and validations are read and written in one way",
        "save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip eval_delay "
        "restore_callback_states_from_checkpoint prediction_loss_only eval_do_concat_batches "
        "eval_use_gather_object include_for_metrics batch_eval_metrics dataloader_drop_last "
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
        "remove_unused_columns label_names length_column_name ignore_bias_buffers do_train do_eval "
        "do_predict",
    ),
)
