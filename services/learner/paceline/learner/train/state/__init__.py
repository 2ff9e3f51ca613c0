"""Holds a rank's state between steps: networks, optimizers, memory, and work ahead."""
