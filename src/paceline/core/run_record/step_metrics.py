"""The numbers of metrics.jsonl: the name of each and what it says, from which docs/metrics.md is made."""

from __future__ import annotations

import re
from collections.abc import Mapping

TIME = "time"
"""When the line was written, in Unix seconds; beside `step` the only key that is no metric."""

STEP_METRICS: Mapping[str, str] = {
    # --- rewards and what becomes of them
    "critic/score/mean": "Mean reward of the step's trajectories, with algorithm.overlong's penalty.",
    "critic/rewards/mean": "The same with the KL penalty (algorithm.use_kl_in_reward).",
    "reward/std": "Standard deviation of the trajectories' rewards, without penalties.",
    "reward/min": "Smallest of them.",
    "reward/max": "Largest of them.",
    "critic/advantages/mean": "Mean advantage per response token.",
    "critic/returns/mean": "Mean return per response token (with a critic).",
    "critic/values/mean": "Mean value per response token (with a critic).",
    "reward/NAME/mean": "Mean of one reward component, by the name of its function or service.",
    "reward/NAME/std": "Its standard deviation; 0 tells nothing apart.",
    "reward/NAME/lowest_share": "Share of responses with the lowest of its values in this step.",
    "reward/NAME/highest_share": "Share with the highest: near 1, it has no more to teach.",
    "reward/greedy_answers/mean": "ReMax: mean reward of the greedy answers.",
    "groups/without_spread": (
        "Share of prompt groups whose samples all have the same reward: with a group's mean as the "
        "baseline they teach nothing."
    ),
    "train/NAME/reward/mean": "Mean reward of the prompts of a set of data.train_sets.",
    "train/NAME/share": "Its share of the step's prompts.",
    "train/source/SOURCE/reward/mean": (
        "Mean reward of the prompts of one data source (data.data_source_key), where there are 2 to 20."
    ),
    "train/source/SOURCE/share": "Its share of the step's prompts.",
    "dynamic_sampling/extra_prompts": "Prompts drawn beyond data.train_batch_size.",
    "dynamic_sampling/kept_share": "Share of all drawn groups that are trained on.",
    "dynamic_sampling/reward_mean": "Mean reward of all samples, those of groups that were set aside too.",
    "overlong/penalty_mean": "Mean penalty for overlong responses.",
    "overlong/share": "Share of responses with such a penalty.",
    "resample/distinct_share": "PF-PPO: share of the trajectories that were drawn at least once.",
    "resample/largest_count": "PF-PPO: how often the most frequent trajectory was drawn.",
    "resample/score_mean": "PF-PPO: mean reward of what was drawn.",
    "dataflow/NAME": "What a dataflow of your own notes with step.note(NAME, value).",
    "dataflow/prompts_too_long": "Prompts that it made and that are over data.max_prompt_length.",
    # --- responses
    "response_length/mean": "Mean response length in tokens that the policy sampled.",
    "response_length/max": "Longest response, counted likewise.",
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
    "actor/ppo_kl_max": "The same in the worst mini-batch.",
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
    "actor/NAME": "A custom policy loss's own metric.",
    "actor/entropy": "Entropy of the policy in nats per response token.",
    "actor/grad_norm": "Gradient norm before clipping, mean over mini-batches.",
    "actor/lr": "Learning rate of the step.",
    "actor/skipped_updates": "Optimizer steps that were not taken.",
    "actor/first_ppo_kl": (
        "KL of the first mini-batch, in audited steps (actor.ratio_audit_freq): 0 but for rounding."
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
    "rollout/largest_weight": "Largest of these weights.",
    "rollout/corrected_share": "Share of tokens that algorithm.rollout_correction changes or masks.",
    # --- held-out prompts
    "val/reward/mean": (
        "Mean reward on the prompts of data.val_files. All metrics below come for each set of data.val_sets, "
        "too, as `val/SET/reward/mean` and so on; docs/evaluate.md."
    ),
    "val/reward/low": "Lower end of its interval of 95%, from bootstrap samples of the prompts.",
    "val/reward/high": "Upper end.",
    "val/avg_at_NUMBER": "Share of right answers: those with a reward above right_above. NUMBER is n.",
    "val/pass_at_NUMBER": "Probability that one of so many answers is right.",
    "val/maj_at_NUMBER": (
        "How often the most frequent final answer of n is right, from three answers on; absent without "
        "trainer.save_trajectories, and where no response has a final answer."
    ),
    "val/cut_off": "Share of responses that ended at the longest length that they may have.",
    "val/episode/NAME": "The same numbers of episodes on held-out prompts.",
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
    "barrier/duplicates": "Trajectories that came a second time and were not admitted again.",
    "barrier/rejected": "Trajectories of another version or digest, or that nobody asked for.",
    "barrier/groups_dropped": "Prompt groups that were dropped after errors.",
    "barrier/groups_dropped/NAME": (
        "Of them those with this reason: `reward_KIND`, with a kind of docs/add-a-reward.md, or "
        "`rollout_REASON`."
    ),
    "barrier/wait_s": "Seconds between the first and the last trajectory.",
    "barrier/staleness/mean": (
        "`barrier.max_staleness`: versions from the weights that sampled a token to those that the step "
        "trained; mean over its tokens."
    ),
    "barrier/staleness/max": "The same of its oldest tokens.",
    # --- replay
    "replay/share": "`algorithm.replay`: share of the step's trajectories that an earlier step has trained.",
    "replay/buffer": "Trajectories that the step could have trained again.",
    "replay/age/mean": (
        "Of what it trained again: versions from the weights that sampled a token to those that the step "
        "trained; mean over its tokens."
    ),
    "replay/age/max": "The same of the oldest of these tokens.",
    # --- work ahead of the barrier
    "ahead/scored_share": (
        "`barrier.work_ahead`: share of the trajectories that the learner had scored when the batch was "
        "complete."
    ),
    "ahead/gradient_share": "The same of trajectories whose gradient it had taken.",
    # --- the guard
    "guard/fired": "Rules that fired.",
    "guard/skipped": "Optimizer steps that its rules skipped.",
    "guard/lr_scale": "Factor that the guard puts on the learning rates.",
    "guard/kl_scale": "Factor that the guard puts on the KL coefficient.",
    "guard/out_of_memory": "Optimizer steps taken again in halved micro-batches, as memory ran out.",
    "guard/clip_scale": "Factor that the guard puts on the policy loss's clip range.",
    "guard/rollbacks": "Rollbacks so far.",
    "guard/rolled_back_to": "Step whose weights a rollback loaded.",
    # --- seconds
    "timing_s/step": "The step, from dispatch to commit.",
    "timing_s/gen": "Until the last response was generated.",
    "timing_s/reward": "What scoring took beyond that.",
    "timing_s/score_p50": "Median time from a response's arrival at a reward service to its score.",
    "timing_s/score_p99": "The same for the slowest hundredth.",
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
    "timing_s/cleanup": "Removing what the step before left in the broker.",
    "timing_s/turns": (
        "`rollout.sleep`: what it takes that learner and rollout servers change places on their GPUs; a part "
        "of `timing_s/other` and, for the KV cache, of `timing_s/update_weights`."
    ),
    "timing_s/turns/sleep": "Of it: engines give up their memory.",
    "timing_s/turns/free": (
        "Of it: the learner looks whether engines have room, and gives back what it caches where they have "
        "not; partly while weights wake."
    ),
    "timing_s/turns/wake_weights": "Of it: engines take memory for weights.",
    "timing_s/turns/wake_kv_cache": "Of it: engines take memory for their KV caches.",
    "perf/freed_gib": "`rollout.sleep`: what the learner gave back, over all ranks; 0 where both fit.",
    "timing_s/other": "The rest of the step.",
    "timing_s/validate": "The validation after the step.",
    "timing_s/checkpoint": (
        "How long the checkpoint held the learner up; it is written while the run goes on."
    ),
    "timing_s/rollback": "Loading earlier weights.",
    # --- throughput
    "perf/tokens_per_s": "Prompt and response tokens of the batch per second of the step.",
    "perf/tokens_per_s_per_gpu": "The same per GPU of learner and rollout servers; absent on CPUs.",
    "perf/num_gpus": "GPUs of learner and rollout servers in the step's push; 0 on CPUs.",
    "perf/overhead_share": "Share of the step that is neither generating nor scoring nor learning.",
    "perf/cpu_cores/NAME": (
        "By kind (controller, rollout, learner, reward): CPU cores that its processes kept busy in the step, "
        "with those that they started; of a learner's ranks the first."
    ),
    "perf/resident_gib/NAME": "Their resident memory at its end; shared pages count for each process.",
    "perf/gpu_utilisation/NAME": (
        "Mean share of the driver's periods in which a kernel ran on a GPU that they may use."
    ),
    "perf/gpu_memory_gib/NAME": "The most memory in use on one of these GPUs, by any process.",
    "perf/mfu": (
        "Share of the GPUs' peak arithmetic that the policy's update uses; absent where the peak is "
        "not known."
    ),
    "perf/imbalance": (
        "How much longer the step's passes take than with even micro-batches, by arithmetic, as ranks wait "
        "for the costliest of those that run together: 0.1 is a tenth."
    ),
    "perf/computed_share": (
        "Arithmetic of the passes over that of a batch without shared prompts; 1 unless "
        "`actor.shared_prompts`."
    ),
    "perf/memory_gib/NAME": (
        "On GPUs: the most that tensors took in a phase of the learner's step, of the rank that took most. "
        "`reserved`: what its allocator has at the step's end, with what it only caches."
    ),
    "perf/compilations": (
        "With `actor.compile`: compilations of layers in the step. The learner compiles before the first "
        "one; its log says why there was another."
    ),
    "perf/compile_s": "With `actor.compile`: seconds of the step that compiling took.",
    # --- the weight push
    "weights/bytes": "Bytes that learner ranks sent.",
    "weights/relayed_bytes": "Bytes that rollout ranks passed on.",
    "weights/transfer_ms": "Milliseconds of the transfer.",
    "weights/digest_ms": "Milliseconds of computing digests.",
    "weights/pause_ms": "Milliseconds from the start of the push until every server samples the new version.",
    "weights/first_open_ms": "The same until the first server does.",
    "weights/peak_extra_bytes": "Most memory beside the parameters that the push used on a rank.",
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
    """Says what a number of metrics.jsonl is; "" where that is written nowhere."""
    for known in (_SET.sub("val/", name), name):
        if known in STEP_METRICS:
            return STEP_METRICS[known]
        if text := next((text for pattern, text in _PATTERNS.items() if pattern.fullmatch(known)), ""):
            return text
    return ""
