"""The names and meanings of the numbers in metrics.jsonl; docs/metrics.md is generated from them."""

from __future__ import annotations

import re
from collections.abc import Mapping

TIME = "time"
"""When the line was written, in Unix seconds; besides `step`, the only key that is not a metric."""

STEP_METRICS: Mapping[str, str] = {
    # --- rewards and advantages
    "critic/score/mean": "Mean reward of the step's trajectories, with algorithm.overlong's penalty.",
    "critic/rewards/mean": (
        "Mean reward of the step's trajectories, including the KL penalty (algorithm.use_kl_in_reward)."
    ),
    "reward/std": "Standard deviation of the trajectories' rewards, without penalties.",
    "reward/min": "Smallest reward of a trajectory, without penalties.",
    "reward/max": "Largest reward of a trajectory, without penalties.",
    "critic/advantages/mean": "Mean advantage per response token.",
    "critic/returns/mean": "Mean return per response token (with a critic).",
    "critic/values/mean": "Mean value per response token (with a critic).",
    "reward/NAME/mean": "Mean of one reward component, by the name of its function or service.",
    "reward/NAME/std": "Standard deviation of the component; at 0 it distinguishes no responses.",
    "reward/NAME/lowest_share": "Share of responses with the component's lowest value in this step.",
    "reward/NAME/highest_share": (
        "Share of responses with the component's highest value; near 1, it has no more to teach."
    ),
    "reward/greedy_answers/mean": "ReMax: mean reward of the greedy answers.",
    "groups/without_spread": (
        "Share of prompt groups whose samples all have the same reward: with a group's mean as the "
        "baseline they teach nothing."
    ),
    "train/NAME/reward/mean": "Mean reward of the prompts of a set of data.train_sets.",
    "train/NAME/share": "Share of the step's prompts that come from this set.",
    "train/source/SOURCE/reward/mean": (
        "Mean reward of the prompts of one data source (data.data_source_key), where there are 2 to 20."
    ),
    "train/source/SOURCE/share": "Share of the step's prompts that come from this data source.",
    "dynamic_sampling/extra_prompts": "Prompts drawn beyond data.train_batch_size.",
    "dynamic_sampling/kept_share": "Share of all drawn groups that are trained on.",
    "dynamic_sampling/reward_mean": (
        "Mean reward of all samples, including those of groups that were set aside."
    ),
    "overlong/penalty_mean": "Mean penalty for overlong responses.",
    "overlong/share": "Share of responses with such a penalty.",
    "resample/distinct_share": "PF-PPO: share of the trajectories that were drawn at least once.",
    "resample/largest_count": "PF-PPO: how often the most frequent trajectory was drawn.",
    "resample/score_mean": "PF-PPO: mean reward of the drawn trajectories.",
    "dataflow/NAME": "What a dataflow of your own records with step.note(NAME, value).",
    "dataflow/prompts_too_long": "Prompts that the dataflow made and that exceed data.max_prompt_length.",
    # --- responses
    "response_length/mean": "Mean response length in tokens that the policy sampled.",
    "response_length/max": "Longest response in tokens that the policy sampled.",
    "response_length/clip_ratio": (
        "Share of responses that reached data.max_response_length, tokens of tools included."
    ),
    "episode/turns/mean": "Episodes (rollout.tools, rollout.environment): mean number of the policy's turns.",
    "episode/turns/max": "Most turns of an episode.",
    "episode/tool_calls/mean": "Mean number of tool calls per episode.",
    "episode/tool_s/mean": "Mean seconds per episode that its tools or its environment took.",
    "episode/stop/NAME": "Share of episodes that ended for this reason (docs/environments.md lists them).",
    # --- the policy's update
    "actor/pg_loss": "Policy loss, mean over mini-batches.",
    "actor/kl_loss": "KL term of the loss before its coefficient; 0 without actor.use_kl_loss.",
    "actor/ppo_kl": (
        "KL from the policy before the step to the updated one per token, mean over mini-batches."
    ),
    "actor/ppo_kl_max": (
        "KL from the policy before the step to the updated one per token, in the worst mini-batch."
    ),
    "actor/pg_clipfrac": "Share of tokens that the policy's clip bounds.",
    "actor/pg_clipfrac_lower": "Share of tokens that the dual clip bounds.",
    "actor/cov_frac": "kl_cov, clip_cov: share of tokens that were selected.",
    "actor/positive_loss": (
        "Mean negative log-prob of the tokens of right responses, before actor.positive_loss_coef; 0 in a "
        "mini-batch without such a response."
    ),
    "actor/load_balance": (
        "Mixture of Experts: how evenly each response's tokens choose experts, mean over trajectories and "
        "layers: 1 is even, experts / experts per token the worst."
    ),
    "actor/router_replay_changed": (
        "actor.router_replay: share of response tokens and layers in which the learner would have chosen "
        "other experts than the engine did."
    ),
    "actor/router_replay_missing": (
        "actor.router_replay: share of response tokens without choices of the engine; the learner chose."
    ),
    "actor/teacher_top_k_mass": (
        "distill: probability that the teacher gives to its likeliest tokens (algorithm.teacher.top_k), mean "
        "over response tokens."
    ),
    "actor/policy_top_k_mass": "distill: probability that the policy gives to the same tokens.",
    "actor/NAME": "A custom policy loss's own metric.",
    "actor/entropy": "Entropy of the policy in nats per response token.",
    "actor/grad_norm": "Gradient norm before clipping, mean over mini-batches.",
    "actor/lr": "Learning rate of the step.",
    "actor/skipped_updates": "Optimizer steps that were not taken.",
    "actor/first_ppo_kl": (
        "KL of the first mini-batch, in audited steps (actor.ratio_audit_freq): 0 up to rounding."
    ),
    "actor/first_pg_clipfrac": "Clip fraction of the first mini-batch in audited steps: 0.",
    "algorithm/reference_kl": (
        "KL to the reference model per token, mean over sequences; 0 without a reference."
    ),
    "algorithm/kl_coef": "Coefficient of the KL penalty in the reward.",
    # --- the critic's update
    "critic/vf_loss": "Value loss, mean over mini-batches.",
    "critic/vf_clipfrac": "Share of tokens that the value clip bounds.",
    "critic/vf_explained_var": "Share of the returns' variance that the values explain; 1 is perfect.",
    "critic/grad_norm": "Gradient norm before clipping, mean over mini-batches.",
    "critic/lr": "Learning rate of the step.",
    "critic/skipped_updates": "Optimizer steps that were not taken.",
    # --- engine and learner
    "rollout/mismatch_kl": (
        "Estimated KL per token from the engine's log-probs to the learner's of the same weights."
    ),
    "rollout/logprob_diff_max": (
        "Largest difference between the engine's and the learner's log-prob of a token."
    ),
    "rollout/effective_sample_size": (
        "Effective share of samples under the importance weights from engine to learner."
    ),
    "rollout/largest_weight": "Largest importance weight from engine to learner.",
    "rollout/corrected_share": "Share of tokens that algorithm.rollout_correction changes or masks.",
    # --- held-out prompts
    "val/reward/mean": (
        "Mean reward on the prompts of data.val_files. All metrics below exist for each of data.val_sets, "
        "too, as `val/SET/reward/mean` and so on; docs/evaluate.md."
    ),
    "val/reward/low": "Lower end of the mean's 95% interval, from bootstrap samples of the prompts.",
    "val/reward/high": "Upper end of the mean's 95% interval.",
    "val/avg_at_NUMBER": "Share of right answers: those with a reward above right_above. NUMBER is n.",
    "val/pass_at_NUMBER": "Probability that at least one of NUMBER answers is right.",
    "val/maj_at_NUMBER": (
        "How often the most frequent of NUMBER final answers is right, if n is at least 3; absent without "
        "trainer.save_trajectories, and where no response has a final answer."
    ),
    "val/cut_off": "Share of responses that reached their length limit.",
    "val/episode/NAME": "The metrics episode/NAME for held-out prompts.",
    "val/response_length/mean": "Mean response length on held-out prompts.",
    "val/num_prompts": "Held-out prompts that were answered and scored.",
    "val/groups_dropped": "Held-out prompts that were dropped after errors.",
    "val/source/SOURCE/NAME": (
        "reward/mean, reward/low, reward/high, avg_at, pass_at, maj_at, cut_off and response_length/mean of "
        "the prompts of one data source (data.data_source_key), in a set with 2 to 20 of them."
    ),
    "val/NAME/mean": "Mean of one reward component on held-out prompts.",
    # --- the barrier
    "barrier/admitted": "Trajectories in the batch.",
    "barrier/duplicates": "Trajectories that arrived again and were not admitted a second time.",
    "barrier/rejected": "Trajectories of another version or digest, or that were not requested.",
    "barrier/groups_dropped": "Prompt groups that were dropped after errors.",
    "barrier/groups_dropped/NAME": (
        "Prompt groups that were dropped for this reason: `reward_KIND`, with a kind of "
        "docs/add-a-reward.md, or `rollout_REASON`."
    ),
    "barrier/wait_s": "Seconds between the first and the last trajectory.",
    "barrier/staleness/mean": (
        "`barrier.max_staleness`: versions from the weights that sampled a token to those that the step "
        "trained; mean over the step's tokens."
    ),
    "barrier/staleness/max": "`barrier.max_staleness`: this number for the step's oldest tokens.",
    # --- replay
    "replay/share": "`algorithm.replay`: share of the step's trajectories that an earlier step has trained.",
    "replay/buffer": "`algorithm.replay`: trajectories that the step could have trained again.",
    "replay/age/mean": (
        "`algorithm.replay`: versions from the weights that sampled a token to those that the step "
        "trained; mean over the tokens that it trained again."
    ),
    "replay/age/max": "`algorithm.replay`: this number for the oldest of these tokens.",
    # --- work ahead of the barrier
    "ahead/scored_share": (
        "`barrier.work_ahead`: share of the trajectories that the learner had scored when the batch was "
        "complete."
    ),
    "ahead/gradient_share": (
        "`barrier.work_ahead`: share of the trajectories whose gradient the learner had computed by then."
    ),
    # --- the guard
    "guard/fired": "Guard rules that fired.",
    "guard/skipped": "Optimizer steps that the guard's rules skipped.",
    "guard/lr_scale": "Factor that the guard puts on the learning rates.",
    "guard/kl_scale": "Factor that the guard puts on the KL coefficient.",
    "guard/out_of_memory": "Optimizer steps repeated in halved micro-batches because memory ran out.",
    "guard/clip_scale": "Factor that the guard puts on the policy loss's clip range.",
    "guard/rollbacks": "Rollbacks of the run so far.",
    "guard/rolled_back_to": "Step whose weights a rollback loaded.",
    # --- seconds
    "timing_s/step": "The step, from dispatch to commit.",
    "timing_s/gen": "Seconds until the last response was generated.",
    "timing_s/reward": "Seconds that scoring took after the last response was generated.",
    "timing_s/score_p50": "Median time from a response's arrival at a reward service to its score.",
    "timing_s/score_p99": (
        "99th percentile of the time from a response's arrival at a reward service to its score."
    ),
    "timing_s/learn": "The learner's step; the phases below are its parts.",
    "timing_s/ahead": "`barrier.work_ahead`: the learner's work before the batch was complete.",
    "timing_s/fetch": "Trajectories from the broker to the learner.",
    "timing_s/old_log_prob": "Log-probs of the policy before the update.",
    "timing_s/ref": "Log-probs of the reference model and other frozen networks.",
    "timing_s/values": "Values of the critic.",
    "timing_s/adv": "Advantages.",
    "timing_s/update_critic": "The critic's update.",
    "timing_s/shared_prompts": "`actor.shared_prompts`: the check in the first step that shares.",
    "timing_s/update_actor": "The policy's update.",
    "timing_s/update_weights": "Pause in which no server samples, while weights are pushed.",
    "timing_s/cleanup": "Removing the previous step's data from the broker.",
    "timing_s/turns": (
        "`rollout.sleep`: seconds in which learner and rollout servers take turns on their GPUs; a part "
        "of `timing_s/other` and, for the KV cache, of `timing_s/update_weights`."
    ),
    "timing_s/turns/sleep": "Part of `timing_s/turns`: engines give up their memory.",
    "timing_s/turns/free": (
        "Part of `timing_s/turns`: the learner checks whether engines have room, and frees its cached "
        "memory if they have not; partly at the same time as `wake_weights`."
    ),
    "timing_s/turns/wake_weights": "Part of `timing_s/turns`: engines take memory for weights.",
    "timing_s/turns/wake_kv_cache": "Part of `timing_s/turns`: engines take memory for their KV caches.",
    "perf/freed_gib": (
        "`rollout.sleep`: cached memory that the learner freed, over all ranks; 0 if engines had room."
    ),
    "timing_s/other": "The rest of the step's seconds.",
    "timing_s/validate": "The validation after the step.",
    "timing_s/checkpoint": (
        "How long the checkpoint delayed the learner; its files are written while the run goes on."
    ),
    "timing_s/rollback": "Loading earlier weights.",
    # --- throughput
    "perf/tokens_per_s": "Prompt and response tokens of the batch per second of the step.",
    "perf/tokens_per_s_per_gpu": "Tokens per second per GPU of learner and rollout servers; absent on CPUs.",
    "perf/num_gpus": "GPUs of learner and rollout servers in the step's push; 0 on CPUs.",
    "perf/overhead_share": "Share of the step that is neither generating nor scoring nor learning.",
    "perf/cpu_cores/NAME": (
        "By kind (controller, rollout, learner, reward): CPU cores that its processes, with their "
        "children, kept busy in the step; for the learner, only the first rank's."
    ),
    "perf/resident_gib/NAME": (
        "By kind: resident memory of these processes at the step's end; shared pages count for each process."
    ),
    "perf/gpu_utilisation/NAME": (
        "By kind: mean share of the driver's periods in which a kernel ran on a GPU that its processes may "
        "use."
    ),
    "perf/gpu_memory_gib/NAME": "By kind: the most memory in use on one of these GPUs, by any process.",
    "perf/mfu": (
        "Share of the GPUs' peak arithmetic that the policy's update uses; absent where the peak is "
        "not known."
    ),
    "perf/imbalance": (
        "How much longer the step's passes take than with equally costly micro-batches, because ranks wait "
        "for the costliest one: 0.1 is a tenth."
    ),
    "perf/computed_share": (
        "Arithmetic of the passes, divided by that without shared prompts; 1 unless `actor.shared_prompts`."
    ),
    "perf/memory_gib/NAME": (
        "On GPUs: the most memory that tensors took in a phase of the learner's step, on the rank that "
        "took most. `reserved`: what the allocator holds at the step's end, including its cache."
    ),
    "perf/compilations": (
        "With `actor.compile`: compilations of layers in the step. The learner compiles before the first "
        "step; its log says why it compiled again."
    ),
    "perf/compile_s": "With `actor.compile`: seconds of the step that compiling took.",
    # --- the weight push
    "weights/bytes": "Bytes that learner ranks sent.",
    "weights/relayed_bytes": "Bytes that rollout ranks passed on.",
    "weights/transfer_ms": "Milliseconds of the transfer.",
    "weights/digest_ms": "Milliseconds of computing digests.",
    "weights/pause_ms": "Milliseconds from the start of the push until every server samples the new version.",
    "weights/first_open_ms": (
        "Milliseconds from the start of the push until the first server samples the new version."
    ),
    "weights/peak_extra_bytes": "Most memory besides the parameters that the push used on a rank.",
}
"""Meaning by name. NAME stands for a name that the configuration gives, SOURCE for one in the data."""

_PLACEHOLDERS = {"NAME": ".+", "SOURCE": ".+", "NUMBER": r"\d+"}
_ANY = re.compile("|".join(_PLACEHOLDERS))
_PATTERNS = {
    re.compile(_ANY.sub(lambda match: _PLACEHOLDERS[match[0]], re.escape(name))): text
    for name, text in STEP_METRICS.items()
    if _ANY.search(name)
}
_SET = re.compile(r"val/(?!(?:episode|reward|response_length|source)/)[^/]+/")


def meaning(name: str) -> str:
    """Returns what a number of metrics.jsonl means; "" for an unknown name."""
    for known in (_SET.sub("val/", name), name):
        if known in STEP_METRICS:
            return STEP_METRICS[known]
        if text := next((text for pattern, text in _PATTERNS.items() if pattern.fullmatch(known)), ""):
            return text
    return ""
