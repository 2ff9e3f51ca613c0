"""The domain: identities, policy versions, trajectories, errors and clocks; plain Python, nothing else."""
