"""Draft and revise: each prompt's first draft is shown to the policy again, and both are trained."""

from statistics import fmean


async def flow(step):
    """A revision answers the question again, after the draft; its samples are a group of their own."""
    drafts = await step.sample(step.draw(), "draft")
    firsts = [group[0] for group in drafts.groups]
    questions = [step.reply(draft, draft.prompt.context.prompt_text) for draft in firsts]
    revisions = await step.sample(questions, "revise")
    if revisions:
        step.note("draft_reward", fmean(draft.reward for draft in drafts))
        step.note("revision_reward", fmean(revision.reward for revision in revisions))
    await step.train([*drafts, *revisions])
    await step.publish()
