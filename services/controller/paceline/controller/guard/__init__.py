"""The guard: rules about the training's health."""
