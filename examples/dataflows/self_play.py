"""Two roles of one policy, with a reward each: a pupil answers, an examiner says whether that is right."""

from statistics import fmean

VERDICTS = {True: "1", False: "0"}


async def flow(step):
    """The pupil's reward is the scorer's; the examiner's is whether its verdict is that of the scorer."""
    answers = await step.sample(step.draw(), "pupil")
    shown = [group[step.number % len(group)] for group in answers.groups]
    questions = [
        step.prompt([{"role": "user", "content": f"{a.prompt.context.prompt_text} {a.text}"}], of=a)
        for a in shown
    ]
    is_right = {q.prompt_id: a.reward > 0 for q, a in zip(questions, shown, strict=True) if q is not None}
    verdicts = [
        v.with_reward(v.text.strip() == VERDICTS[is_right[v.prompt.prompt_id]])
        for v in await step.sample(questions, "examiner")
    ]
    step.note("pupil_reward", fmean(a.reward for a in answers))
    step.note("examiner_reward", fmean(v.reward for v in verdicts))
    await step.train([*answers, *verdicts])
    await step.publish()
