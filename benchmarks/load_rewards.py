"""The reward of benchmarks/load.py."""


def length(response: str, ground_truth: str, **_: object) -> float:
    """Returns a cheap number that differs between samples."""
    return float(len(response) % 2)
