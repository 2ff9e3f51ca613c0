"""Checks a step of the journal, from its dispatch to its event `step`."""
