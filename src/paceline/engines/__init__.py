"""Describes the inference engines to the rest of the program: `engine_facts(config.rollout.name)`."""
