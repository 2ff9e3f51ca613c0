"""Draft and revise: each prompt's first draft is shown to the policy again, and both are trained."""

from statistics import fmean


async def flow(step):
    """Trains drafts and revisions; the revisions of one draft are a prompt group."""
    drafts = await step.sample(step.draw(), "draft")
    shown = [group[0] for group in drafts.groups]
    questions = [step.reply(draft, draft.prompt.context.prompt_text) for draft in shown]
    revisions = await step.sample(questions, "revise")
    step.note("draft_reward", fmean(draft.reward for draft in drafts))
    step.note("revision_reward", fmean(revision.reward for revision in revisions) if revisions else 0.0)
    await step.train([*drafts, *revisions])
    await step.publish()
