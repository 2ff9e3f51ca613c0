"""The controller: sequences batches between rollout, reward and learner."""
