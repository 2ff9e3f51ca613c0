"""The domain: identities, policy versions, trajectories, errors and clocks, in plain Python."""
