"""The chart's network policies: who reaches whom."""

from __future__ import annotations

import pytest

from support.chart import MANY, Manifest, ways

pytestmark = pytest.mark.timeout(900)


def test_services_reach_whom_they_must_and_nobody_else(many: dict[tuple[str, str], Manifest]) -> None:
    """docs/several-hosts.md, "Ports"."""
    members = ("learner", "reward", "rollout")
    # Weights and the ranks' stores take any port.
    weights: dict[tuple[str, str], set[int | None]] = {
        ("learner", "learner"): {None},
        ("learner", "rollout"): {None},
        ("rollout", "learner"): {None},
        ("rollout", "rollout"): {None},
    }
    assert ways(many) == {
        **{("controller", member): {7000} for member in members},
        **{(member, "controller"): {7000} for member in members},
        **{(service, to): {6379} for service in ("controller", *members) for to in ("redis", "blobs")},
        **weights,
    }
    policies = {name: each["spec"] for (kind, name), each in many.items() if kind == "NetworkPolicy"}
    outside = [rule for rule in policies["reward"]["ingress"] if rule["from"] == MANY["reward"]["callers"]]
    assert outside == [{"from": MANY["reward"]["callers"], "ports": [{"port": 7000}]}]
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == name
        assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "run"


def test_every_rank_can_be_scraped(models: dict[tuple[str, str], Manifest]) -> None:
    for component, last in (("controller", 9464), ("learner", 9465), ("rollout", 9464), ("reward", 9464)):
        ingress = models["NetworkPolicy", component]["spec"]["ingress"]
        (ports,) = [way["ports"] for way in ingress if way["from"] == [{"namespaceSelector": {}}]]
        assert ports == [{"port": 9464, "endPort": last}]


def test_reward_models_reach_the_reward_service_alone(models: dict[tuple[str, str], Manifest]) -> None:
    peers = {pair: ports for pair, ports in ways(models).items() if "reward-model" in pair}
    assert peers == {("reward-model", "reward"): {7000}}
    policy = models["NetworkPolicy", "reward-model"]["spec"]
    assert policy["ingress"] == []
    labels = models["Deployment", "reward-model-rm"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()


def test_pods_may_ask_the_name_server_of_their_node(many: dict[tuple[str, str], Manifest]) -> None:
    for (kind, name), policy in many.items():
        if kind == "NetworkPolicy":
            ways_ = [
                each
                for each in policy["spec"]["egress"]
                if {"port": 53, "protocol": "UDP"} in each.get("ports", ())
            ]
            (way,) = ways_
            assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in way["to"], name
