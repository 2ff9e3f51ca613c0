"""Episodes: samples of several turns, between which tools or an environment answer."""
