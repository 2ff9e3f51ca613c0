"""The chart's reward models: replicas, probes, whom they attach to, what is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import EXIT_GIVEN, ConfigError
from paceline.reward.models import __main__ as reward_models
from paceline.reward.models.model import ModelOptions
from support.chart import FOLDER, MODELS, Manifest, environment, helm, secrets_of, write

pytestmark = pytest.mark.timeout(900)


def test_each_reward_model_has_its_replicas_and_what_it_needs(
    models: dict[tuple[str, str], Manifest],
    secrets: dict[str, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "run.yaml").write_text(models["ConfigMap", "controller"]["data"]["run.yaml"])
    loaded: list[ModelOptions] = []

    def load_model(options: ModelOptions) -> None:
        loaded.append(options)
        raise ConfigError("a test has no model")

    for kind in ("sequence_classification", "process"):
        monkeypatch.setitem(reward_models._ENGINES["transformers"], kind, load_model)  # type: ignore[misc]
    replicas, selectors, pods_of = {}, [], {}
    for name in ("rm", "steps"):
        spec = models["Deployment", f"reward-model-{name}"]["spec"]
        replicas[name], pod = spec["replicas"], spec["template"]["spec"]
        selectors.append(spec["selector"]["matchLabels"])
        assert selectors[-1] == spec["template"]["metadata"]["labels"]
        pods_of[name], container_ = pod, pod["containers"][0]
        arguments: list[str] = container_["args"]
        assert arguments[arguments.index("--attach") + 1] == "run-reward-members:7000"
        assert "--every-address" in arguments
        ready = tmp_path / "ready"
        words = [
            {"/etc/paceline/run.yaml": str(tmp_path / "run.yaml"), "/tmp/attached": str(ready)}.get(
                word, word
            )
            for word in arguments
        ]
        ready.touch()  # of a process that was killed
        assert reward_models.main(words) == EXIT_GIVEN
        assert not ready.exists()
        mounts = {mount["name"]: mount["mountPath"] for mount in container_["volumeMounts"]}
        folders = {environment(pod)["PACELINE_TLS_DIR"]: "tls", "/etc/paceline": "config"}
        assert folders.items() <= {path: name for name, path in mounts.items()}.items()
        for made, keys in secrets_of(pod):
            assert keys <= secrets[made].keys()
    assert [options.path for options in loaded] == ["models/rm", "models/steps"]
    assert replicas == {"rm": 2, "steps": 1}
    assert selectors[0] != selectors[1]
    rm, steps = (pods_of[name]["containers"][0]["resources"] for name in ("rm", "steps"))
    assert rm["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert steps["limits"] == {"memory": "8Gi"}
    assert [pods_of[name].get("nodeSelector") for name in ("rm", "steps")] == [{"gpu": "h100"}, None]
    assert all(pod["tolerations"] for pod in pods_of.values())
    assert environment(pods_of["steps"])["OMP_NUM_THREADS"] == "4"
    probe = pods_of["rm"]["containers"][0]["startupProbe"]
    # It may load for wait_for_s, and wait five minutes for the reward service.
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 900 + 300


def test_a_reward_models_probes_look_at_the_file_that_it_writes(
    models: dict[tuple[str, str], Manifest], tmp_path: Path
) -> None:
    container_ = models["Deployment", "reward-model-rm"]["spec"]["template"]["spec"]["containers"][0]
    file = tmp_path / "attached"
    path = container_["args"][container_["args"].index("--ready-file") + 1]

    def passes() -> dict[str, bool]:
        said = {}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = [word.replace(path, str(file)) for word in container_[name]["exec"]["command"]]
            assert str(file) in " ".join(command)
            said[name] = subprocess.run(command, timeout=30, check=False).returncode == 0
        return said

    assert passes() == {"startupProbe": False, "readinessProbe": False, "livenessProbe": True}
    file.touch()
    assert passes() == {"startupProbe": True, "readinessProbe": True, "livenessProbe": True}
    os.utime(file, (0, 0))  # a process that is stuck
    assert passes()["livenessProbe"] is False


def test_the_name_that_reward_models_attach_to_stands_for_every_reward_service(
    models: dict[tuple[str, str], Manifest],
) -> None:
    service, reward = (
        models[key]["spec"] for key in (("Service", "reward-members"), ("Deployment", "reward"))
    )
    assert reward["replicas"] == 2
    # Without an address of its own its name stands for those of the pods.
    assert service["clusterIP"] == "None"
    assert service["selector"] == reward["template"]["metadata"]["labels"]
    assert service["ports"] == [{"name": "grpc", "port": 7000}]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"config": MODELS["config"].replace("name: rm", "name: my_rm")}, "lower-case letters, digits and"),
        ({"overrides": ["reward.models=[]"]}, "name reward models in config, not in overrides"),
        (
            {"rewardModels": {"named": {"mr": {}}}},
            "rewardModels.named has mr, which reward.models of config does not name",
        ),
        ({"config": "reward: [}"}, "config is not YAML"),
    ],
)
def test_reward_models_that_the_chart_cannot_run_are_refused(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    said = helm("template", "run", FOLDER / "paceline", "--values", write(MODELS | change, tmp_path), code=1)
    assert sentence in said
