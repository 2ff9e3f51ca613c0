"""Best-of-n self-training (RAFT, arXiv:2304.06767): imitates the best sample of each prompt."""


async def flow(step):
    """Trains those best samples that are right, with the loss of supervised fine-tuning.

    A reward of 1 and a baseline of 0 make every advantage 1; with `actor.policy_loss: gpg` the loss is then
    the negative log-likelihood of the kept samples.
    """
    answers = await step.sample(step.draw())
    best = [max(group, key=lambda answer: answer.reward) for group in answers.groups]
    kept = [answer for answer in best if answer.reward > 0] or best[:1]
    step.note("kept_share", len(kept) / len(best))
    await step.train([answer.with_reward(1.0).with_baseline(0.0) for answer in kept])
    await step.publish()
