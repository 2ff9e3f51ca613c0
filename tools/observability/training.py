"""The dashboard of training health."""

from __future__ import annotations

from observability.dashboards import Dashboard, Panel, of_step

TRAINING = Dashboard(
    uid="paceline-training",
    title="Paceline: training health",
    rows=(
        (
            "Is it learning?",
            (
                Panel(
                    title="Step",
                    answers="Does the run go on, and how far is it?",
                    expressions=(
                        ("paceline_training_step", "finished"),
                        ("paceline_run_step", "under way"),
                        ("paceline_run_total_steps", "total"),
                    ),
                ),
                Panel(
                    title="Reward",
                    answers="Do scores rise, on training and on validation prompts?",
                    expressions=of_step("critic/score/mean", "critic/rewards/mean", "val/reward/mean"),
                ),
                Panel(
                    title="KL to the reference",
                    answers="How far is the policy from the starting model, and what does that cost?",
                    expressions=of_step("algorithm/reference_kl", "algorithm/kl_coef"),
                ),
                Panel(
                    title="Entropy",
                    answers="Does the policy still explore, or does it collapse?",
                    expressions=of_step("actor/entropy"),
                ),
            ),
        ),
        (
            "Are the updates sound?",
            (
                Panel(
                    title="KL of the updates",
                    answers="Does a step move the policy too far?",
                    expressions=of_step("actor/ppo_kl", "actor/ppo_kl_max"),
                ),
                Panel(
                    title="Clip fractions",
                    answers="How many tokens do the clips bound?",
                    expressions=of_step("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"),
                    unit="percentunit",
                ),
                Panel(
                    title="Gradient norms",
                    answers="Do gradients explode?",
                    expressions=of_step("actor/grad_norm", "critic/grad_norm"),
                    log=True,
                ),
                Panel(
                    title="Mismatch of engine and learner",
                    answers="Does the engine draw from the distribution that the learner computes?",
                    expressions=of_step("rollout/mismatch_kl", "rollout/logprob_diff_max"),
                    log=True,
                ),
                Panel(
                    title="Losses",
                    answers="What do actor and critic minimise?",
                    expressions=of_step("actor/pg_loss", "critic/vf_loss"),
                ),
                Panel(
                    title="Guard",
                    answers="What does each rule measure, as a share of its bound for a warning?",
                    expressions=(
                        (
                            (
                                "paceline_guard_value / on (service_instance_id, instance, rule) "
                                'group_left () (paceline_guard_bound{action="warn"} > 0)'
                            ),
                            "{{rule}} {{network}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Where does the time go?",
            (
                Panel(
                    title="Response length",
                    answers="Do answers get longer, and how many are cut off?",
                    expressions=of_step(
                        "response_length/mean", "response_length/max", "response_length/clip_ratio"
                    ),
                ),
                Panel(
                    title="Tokens per second",
                    answers="How fast is the whole loop?",
                    expressions=of_step("perf/tokens_per_s"),
                ),
                Panel(
                    title="Phases",
                    answers="How long does each phase take?",
                    expressions=of_step(
                        "timing_s/gen",
                        "timing_s/reward",
                        "timing_s/learn",
                        "timing_s/update_weights",
                        "timing_s/cleanup",
                        "timing_s/other",
                    ),
                    unit="s",
                ),
                Panel(
                    title="Overhead",
                    answers="What share of a step is neither generating, scoring nor learning?",
                    expressions=of_step("perf/overhead_share"),
                    unit="percentunit",
                ),
            ),
        ),
    ),
)
