"""Reward models, which run as services beside the reward service."""
