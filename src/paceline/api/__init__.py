"""Training and reading runs from Python: scripts and notebooks import this."""

from paceline.api.callbacks import Callback, EarlyStop, Training
from paceline.api.run import LoadedRun, load_run
from paceline.api.step import Step
from paceline.api.training import train

__all__ = ["Callback", "EarlyStop", "LoadedRun", "Step", "Training", "load_run", "train"]
