"""The state of a rank between steps: networks, optimizers, their memory, work begun on the next step."""
