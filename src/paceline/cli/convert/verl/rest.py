"""Keys of verl that have no counterpart, and those on which no number depends."""

from __future__ import annotations

from paceline.cli.convert.rules import ConversionRule, no_effect, only, options

_DECODING = "changes the sampled distribution, which the loss would have to account for"
_A, _R, _M, _REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "ref"))
_MICRO_BATCHES = (
    *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    *("forward_micro_batch_size", "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
)
_SCORED = ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")

REST: tuple[ConversionRule, ...] = (
    only(_DECODING, f"{_R}.top_p", neutral=(None, 1)),
    only(_DECODING, f"{_R}.top_k", neutral=(None, 0, -1)),
    only(_DECODING, f"{_R}.do_sample", neutral=(None, True)),
    only(_DECODING, f"{_R}.ignore_eos"),
    only("write an environment or tools; docs/environments.md", f"{_R}.multi_turn.enable"),
    only("write an environment; docs/environments.md", f"{_R}.agent.agent_loop_config_path"),
    only(
        "write an environment; docs/environments.md",
        f"{_R}.agent.default_agent_loop",
        neutral=(None, "single_turn_agent"),
    ),
    only("see rollout.engine_kwargs", f"{_R}.engine_kwargs.*", neutral=(None,)),
    only("samples come from the policy's own weights", f"{_R}.quantization"),
    only("mini-batches are taken in the order of the prompts", f"{_A}.shuffle critic.shuffle"),
    only("code of a model's repository is not run; see docs/models.md", f"{_M}.trust_remote_code"),
    only("write the template into the tokenizer's folder", f"{_M}.custom_chat_template"),
    only("name the layers that have adapters", f"{_M}.exclude_modules"),
    only("merge it into the model first", f"{_M}.lora_adapter_path {_M}.lora.adapter_path"),
    only(
        "adapters are plain LoRA, without dropout",
        f"{_M}.lora.dropout {_M}.lora.exclude_modules {_M}.lora.merge",
    ),
    only("modules are not imported; see docs/models.md", f"{_M}.external_lib"),
    only(
        "change config.json in the model's folder",
        f"{_M}.override_config {_M}.override_config.*",
        neutral=(None,),
    ),
    only("heads for several tokens are not trained", f"{_M}.mtp.enable"),
    options("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
    only("write the rows to a file", "data.custom_cls.path"),
    only("see algorithm.rollout_correction", "algorithm.rollout_correction.rollout_rs"),
    only("log-probs of the policy are the learner's own", "algorithm.rollout_correction.bypass_mode"),
    only(
        "write a reward function; docs/add-a-reward.md",
        "reward_model.reward_manager reward_manager.name reward.reward_manager.name",
        neutral=(None, "naive", "dapo", "batch", "prime"),
    ),
    only(
        "see reward.code for programs that are run",
        "sandbox_fusion.url reward.sandbox_fusion.url reward_model.sandbox_fusion.url",
    ),
    only("see docs/distillation.md", "distillation.enabled"),
    only("`paceline report` shows validations; a run trains", "trainer.val_only"),
    only("set trainer.run_dir to the run's folder", "trainer.resume_from_path"),
    only(
        "here a step's samples are always of its own policy; see barrier.mode",
        "trainer.v1.trainer_mode",
        neutral=(None, "sync"),
    ),
    no_effect(
        "micro-batches are filled by tokens, up to `actor.ppo_max_token_len_per_gpu`",
        " ".join(
            (
                *(f"{at}.{name}" for at in (_A, "critic") for name in _MICRO_BATCHES),
                *(f"{at}.log_prob_{name}" for at in (_R, _REF) for name in _SCORED),
            )
        ),
    ),
    no_effect(
        "memory, kernels and sharding: `actor.memory`, `learner.context_parallel`, "
        "`learner.tensor_parallel`, `learner.expert_parallel`, docs/gpus-and-memory.md",
        f"model_engine hydra.searchpath {_A}.engine.* {_A}.model_engine "
        f"{_A}.fsdp_config.* {_A}.megatron.* {_A}.veomni.* {_A}.strategy {_A}.ulysses_sequence_parallel_size "
        f"{_A}.entropy_from_logits_with_chunking {_A}.entropy_from_logits_chunk_size "
        f"{_A}.entropy_checkpointing {_A}.use_remove_padding {_A}.use_torch_compile {_A}.use_fused_kernels "
        f"{_A}.use_prefix_grouper {_A}.pad_to_length {_A}.calculate_entropy {_A}.calculate_sum_pi_squared "
        f"{_A}.sum_pi_squared_checkpointing {_A}.checkpoint.* {_A}.profiler.* {_A}.router_replay.* "
        f"{_A}.data_loader_seed {_A}.rollout_n {_A}.qat.* {_A}.policy_loss.dro_beta {_A}.load_weight "
        f"{_REF}.* critic.fsdp.* critic.model.* critic.megatron.* critic.checkpoint.* critic.profiler.* "
        "critic.strategy critic.enable critic.rollout_n critic.data_loader_seed critic.loss_agg_mode "
        "critic.loss_scale_factor critic.ulysses_sequence_parallel_size critic.use_torch_compile",
    ),
    no_effect(
        "models are loaded in one way, and rows are always packed",
        f"{_M}.enable_gradient_checkpointing {_M}.enable_activation_offload {_M}.use_remove_padding "
        f"{_M}.use_liger {_M}.use_fused_kernels {_M}.fused_kernel_options.* {_M}.tiled_mlp.* {_M}.use_shm "
        f"{_M}.hf_config_path {_M}.mtp.* {_M}.lora.*",
    ),
    no_effect(
        "the launcher places and starts the servers: `placement`, `rollout.*`",
        f"{_R}.name {_R}.mode {_R}.dtype {_R}.prompt_length {_R}.response_length {_R}.nnodes "
        f"{_R}.n_gpus_per_node {_R}.cudagraph_capture_sizes {_R}.free_cache_engine {_R}.data_parallel_size "
        f"{_R}.expert_parallel_size {_R}.pipeline_model_parallel_size {_R}.max_num_batched_tokens "
        f"{_R}.max_model_len {_R}.enable_chunked_prefill {_R}.enable_prefix_caching {_R}.logprobs_mode "
        f"{_R}.scheduling_policy {_R}.load_format {_R}.disable_log_stats {_R}.over_sample_rate "
        f"{_R}.multi_stage_wake_up {_R}.engine_kwargs {_R}.val_kwargs.do_sample {_R}.multi_turn.* "
        f"{_R}.agent.* {_R}.calculate_log_probs {_R}.checkpoint_engine.* {_R}.trace.* {_R}.skip_rollout "
        f"{_R}.skip_dump_dir {_R}.skip_tokenizer_init {_R}.enable_rollout_routing_replay {_R}.profiler.* "
        f"{_R}.prometheus.* {_R}.quantization_config_file {_R}.mtp {_R}.layered_summon {_R}.full_determinism "
        f"{_R}.moe_tensor_parallel_size "
        f"{_R}.seed {_R}.moe_load_balance_metrics_interval {_R}.qat {_R}.disaggregation.* {_R}.limit_images "
        "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout",
    ),
    no_effect(
        "rows are read from files at the start",
        "data.tokenizer data.use_shm data.val_batch_size data.tool_config_path data.function_tool_path "
        "data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.dataloader_num_workers "
        "data.image_patch_size data.validation_shuffle data.filter_overlong_prompts_workers data.video_key "
        "data.audio_key data.trust_remote_code data.custom_cls.name data.return_multi_modal_inputs "
        "data.sampler.* data.datagen.* data.mm_processor_kwargs data.mm_processor_kwargs.*",
    ),
    no_effect(
        "scorers have settings of their own: `reward.*`",
        "reward_manager.* reward.reward_manager.* reward_model.* reward.reward_model.* reward.num_workers "
        "sandbox_fusion.* reward.sandbox_fusion.*",
    ),
    no_effect(
        "together with a key that Paceline lacks",
        "algorithm.rollout_correction.* distillation.* trainer.v1.* trainer.use_v1",
    ),
    no_effect(
        "`placement`, `learner.world_size` and `rollout.replicas`; docs/several-hosts.md",
        "trainer.nnodes trainer.n_gpus_per_node trainer.balance_batch trainer.device "
        "trainer.use_legacy_worker_impl trainer.ray_wait_register_center_timeout ray_kwargs.* "
        "transfer_queue.*",
    ),
    no_effect(
        "every run keeps its samples, metrics and spans; docs/observability.md",
        "trainer.project_name trainer.log_val_generations trainer.rollout_data_dir "
        "trainer.validation_data_dir trainer.esi_redundant_time trainer.default_hdfs_dir "
        "trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep global_profiler.* skip.*",
    ),
)
