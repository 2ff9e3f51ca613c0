"""The rollout service: draws samples with an inference engine."""
