"""What `paceline check` says of episodes: the chat template's self-test, the tools that can be called."""

from __future__ import annotations

import asyncio

from paceline.config.run import RunConfig
from paceline.data.prompts import load_tokenizer, stop_token_ids
from paceline.rollout.episodes.group import environment_of, rules_of
from paceline.service.credentials import Credentials
from paceline.storage.models import local_model


def check_episodes(config: RunConfig) -> str:
    """A line of facts.

    Raises:
        PacelineError: the chat template cannot carry several turns, or a tool cannot be used.
    """
    if not config.has_episodes:
        return "none"
    model = local_model(config.model, "controller")
    tokenizer = load_tokenizer(model.tokenizer_path or model.path)
    rules = rules_of(config, tokenizer, stop_token_ids(model.path, tokenizer))
    service = config.rollout.environment
    names = (
        ", ".join(asyncio.run(_call_names(config)))
        if service is None
        else f"of {service.address or service.attached}"
    )
    return (
        f"up to {rules.limits.max_turns} turns; tools {names}; calls are {rules.call_format}, "
        f"answers come in the role {rules.joiner.tool_role}"
    )


async def _call_names(config: RunConfig) -> list[str]:
    environment = environment_of(config, Credentials.from_env())
    try:
        await environment.start()
        return list(environment.call_names)
    finally:
        await environment.close()
