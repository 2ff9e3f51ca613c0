"""Training and reading runs from Python: scripts and notebooks import this."""

from paceline.api.run import LoadedRun, load_run
from paceline.api.training import Step, train

__all__ = ["LoadedRun", "Step", "load_run", "train"]
