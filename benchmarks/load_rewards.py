"""The reward of benchmarks/load.py."""


def length(response: str, ground_truth: str, **_: object) -> float:
    """Something that differs between samples and costs nothing."""
    return float(len(response) % 2)
