"""Two roles of one policy, each with a reward: a pupil answers, then an examiner answers the same question.

The examiner accepts the pupil's answer if both sums agree.
"""

import re
from statistics import fmean


def last_number(text):
    """Returns the last number of an answer, or "" if there is none."""
    return (re.findall(r"\d+", text) or [""])[-1]


async def flow(step):
    """Trains both roles. The pupil's reward is the scorer's; the examiner's is 1 if it judged correctly."""
    answers = await step.sample(step.draw(), "pupil")
    shown = [group[step.number % len(group)] for group in answers.groups]
    asked = [(step.reply(a, a.prompt.context.prompt_text), a) for a in shown]
    pupils = {question.prompt_id: a for question, a in asked if question is not None}
    verdicts = []
    for answer in await step.sample([question for question, _ in asked], "examiner"):
        pupil = pupils[answer.prompt.prompt_id]
        agrees = last_number(answer.text) == last_number(pupil.text)
        verdicts.append(answer.with_reward(agrees == (pupil.reward > 0)))
    step.note("pupil_reward", fmean(a.reward for a in answers))
    step.note("examiner_reward", fmean(v.reward for v in verdicts) if verdicts else 0.0)
    step.note("always_no", fmean(a.reward <= 0 for a in shown))
    await step.train([*answers, *verdicts])
    await step.publish()
