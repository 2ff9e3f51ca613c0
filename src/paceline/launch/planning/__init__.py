"""Plans which processes a run has, and where: on this machine, over several hosts, or joining later."""
