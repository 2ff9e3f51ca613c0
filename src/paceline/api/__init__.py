"""Training and reading runs from Python: scripts and notebooks import this."""

from paceline.api.callbacks import Callback, EarlyStop, Training
from paceline.api.run import LoadedRun, load_run
from paceline.api.session import LedRun, LedStep, session
from paceline.api.step import Step
from paceline.api.training import train

__all__ = [
    "Callback",
    "EarlyStop",
    "LedRun",
    "LedStep",
    "LoadedRun",
    "Step",
    "Training",
    "load_run",
    "session",
    "train",
]
