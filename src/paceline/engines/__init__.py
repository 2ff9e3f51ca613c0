"""Describes the inference engines to all who are not one: `engine_facts(config.rollout.name)`."""
