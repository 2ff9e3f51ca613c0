"""ReMax (arXiv:2310.10505) as a dataflow: the reward of a greedy answer to each prompt is the baseline."""


async def flow(step):
    """Gives bitwise the results of the built-in dataflow with `algorithm.adv_estimator: remax`."""
    asks = step.ask("train"), step.ask("greedy", 1, temperature=0.0)
    answers = await step.sample(step.draw(), *asks)
    await step.train(answers.against("greedy"))
    await step.publish()
