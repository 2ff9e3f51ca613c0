"""Draft and revise from a script that controls the loop: python examples/dataflows/led_by_a_script.py."""

import asyncio
import sys
from statistics import fmean

from paceline.api import session


async def main(*overrides):
    """Trains until nine out of ten drafts are right."""
    config = "examples/dataflows/draft_and_revise.yaml"
    async with session(config, "trainer.name=led-by-a-script", *overrides) as run:
        async for step in run:
            drafts = await step.sample(await step.draw(), "draft")
            questions = [
                await step.reply(group[0], group[0].prompt.context.prompt_text) for group in drafts.groups
            ]
            revisions = await step.sample(questions, step.ask("revise", 4))
            await step.note("revisions", len(revisions))
            await step.train([*drafts, *revisions])
            await step.publish()
            right = fmean(draft.reward for draft in drafts)
            print(f"step {step.number}: {right:.3f} of the drafts are right")
            if right >= 0.9:
                break


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
