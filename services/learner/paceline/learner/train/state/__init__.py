"""What a rank holds from step to step: networks, optimizers, their memory, begun work of the next step."""
