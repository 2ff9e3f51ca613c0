"""The chart with servers that only answer held-out prompts (`rollout.validation_servers`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from support.chart import CONFIG, FOLDER, MODELS, VERSIONS, Manifest, helm, render, ways, write

pytestmark = pytest.mark.timeout(900)

VALIDATING: dict[str, Any] = {
    "config": CONFIG.replace("rollout: {n: 4}", "rollout: {n: 4, validation_servers: 1}"),
    "rollout": {"replicas": 3, "gpus": 2, "pod": {"nodeSelector": {"pool": "h100"}}},
    "metrics": MODELS["metrics"] | {"podMonitors": {"enabled": True}},
}


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Manifest]:
    return render(write(VALIDATING, tmp_path_factory.mktemp("validating")))


def test_the_servers_that_validate_are_pods_like_the_others(
    manifests: dict[tuple[str, str], Manifest],
) -> None:
    training, validating = (manifests["Deployment", name] for name in ("rollout", "validation"))
    assert [each["spec"]["replicas"] for each in (training, validating)] == [2, 1]
    assert manifests["ConfigMap", "controller"]["data"]["rollout_replicas"] == "3"
    kubernetes_validate.validate(validating, VERSIONS[-1], strict=True)
    pods = [dict(each["spec"]["template"]["spec"]) for each in (training, validating)]
    (ours,), (theirs,) = ([dict(each) for each in pod.pop("containers")] for pod in pods)
    assert pods[0] == pods[1]
    assert theirs.pop("args") == ["--validates"]
    assert "args" not in ours
    assert theirs | {"name": "rollout"} == ours


def test_no_deployment_selects_the_others_pods(manifests: dict[tuple[str, str], Manifest]) -> None:
    for name, other in (("rollout", "validation"), ("validation", "rollout")):
        selected = manifests["Deployment", name]["spec"]["selector"]["matchLabels"]
        own, others = (
            manifests["Deployment", one]["spec"]["template"]["metadata"]["labels"] for one in (name, other)
        )
        assert selected.items() <= own.items()
        assert not selected.items() <= others.items()


def test_they_reach_whom_servers_reach(manifests: dict[tuple[str, str], Manifest]) -> None:
    reached = ways(manifests)
    for server in ("rollout", "validation"):
        assert {pair: ports for pair, ports in reached.items() if server in pair} == {
            ("controller", server): {7000},
            (server, "controller"): {7000},
            (server, "redis"): {6379},
            ("learner", server): {None},
            (server, "learner"): {None},
            ("rollout", server): {None},
            (server, "rollout"): {None},
            ("validation", server): {None},
            (server, "validation"): {None},
        }


def test_prometheus_takes_them_for_rollout_servers(manifests: dict[tuple[str, str], Manifest]) -> None:
    monitor = manifests["PodMonitor", "validation"]["spec"]
    labels = manifests["Deployment", "validation"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "paceline-rollout"}]
    assert endpoint["tlsConfig"]["serverName"] == "rollout.paceline"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rollout": {"replicas": 1}}, "rollout.replicas, 1, counts all servers"),
        ({"overrides": ["rollout.validation_servers=1"]}, "set rollout.validation_servers in config"),
        (
            {"rollout": {"replicas": 2, "autoscale": {"enabled": True, "min": 2, "prometheus": "http://p"}}},
            "rollout.replicas = 2, of which 1 train",
        ),
    ],
)
def test_what_the_chart_cannot_start_is_refused(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    values = write(VALIDATING | change, tmp_path)
    assert sentence in helm("template", "run", FOLDER / "paceline", "--values", values, code=1)
