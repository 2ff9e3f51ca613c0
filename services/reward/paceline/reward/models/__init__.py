"""Reward models: services of their own beside the reward service."""
