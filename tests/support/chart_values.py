"""What each value of the chart changes: another value, and where the manifests differ for it."""

from __future__ import annotations

from typing import Any, Final

from support.chart import MODELS

# Everything on, so that each value has something to change.
BASE: Final[dict[str, Any]] = MODELS | {
    "volumes": {
        name: {"persistentVolumeClaim": {"claimName": name}} for name in ("models", "data", "checkpoints")
    },
    "learner": {"nodes": 2},
    "rollout": {"replicas": 2, "autoscale": {"enabled": True, "prometheus": "http://prometheus"}},
    "metrics": {
        "scrapers": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
        **{name: {"enabled": True} for name in ("podMonitors", "rules", "dashboards")},
    },
    "blobs": {"stores": 1},
}
EXTERNAL = BASE | {
    "redis": {
        "external": {
            "url": "rediss://paceline@redis.example.org:6380/0",
            "passwordSecret": "password",
            "caSecret": "authority",
            "to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}],
        }
    },
    "blobs": {},
}

CONTROLLER, LEARNER = "Job/controller", "Job/learner"
REDIS, BLOBS = "StatefulSet/redis", "StatefulSet/blobs"
ROLLOUT, REWARD = "Deployment/rollout", "Deployment/reward"
RM, STEPS = "Deployment/reward-model-rm", "Deployment/reward-model-steps"
MEMBERS = [LEARNER, ROLLOUT, REWARD]
SERVICES = [CONTROLLER, *MEMBERS]
PROCESSES = [*SERVICES, RM, STEPS]
PODS = [*PROCESSES, REDIS, BLOBS]
POLICIES = [f"NetworkPolicy/{name}" for name in ("controller", "learner", "rollout", "reward")]
MONITORS = [f"PodMonitor/{name}" for name in ("controller", "learner", "rollout", "reward")]
POD = "spec.template.spec"
# The whole object, which is made or not made.
WHOLE = ""

CLAIM = {"persistentVolumeClaim": {"claimName": "other"}}
PLACE = [{"ipBlock": {"cidr": "10.7.7.7/32"}}]
MEMORY = {"limits": {"memory": "77Gi"}}


def container(name: str) -> str:
    """Where the container of a workload, Kind/component, is in its manifest."""
    component = name.partition("/")[2]
    return f"{POD}.containers.{'reward-model' if component.startswith('reward-model') else component}"


def in_pods(path: str, *names: str) -> dict[str, list[str]]:
    return {name: [f"{POD}.{path}"] for name in names}


def in_containers(path: str, *names: str) -> dict[str, list[str]]:
    return {name: [f"{container(name)}.{path}"] for name in names}


def both(*parts: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: [path for part in parts for path in part.get(name, ())] for part in parts for name in part}


_ENV = "env.{}.value".format
_HASH = "spec.template.metadata.annotations.paceline/config"
_METRICS = {
    name: [
        f"{container(name)}.{_ENV('PACELINE_PROMETHEUS_PORT')}",
        f"{container(name)}.ports.metrics.containerPort",
    ]
    for name in SERVICES
}

# Value, and where the manifests differ for it: paths by object.
EFFECTS: dict[str, tuple[Any, dict[str, list[str]]]] = {
    "config": (
        BASE["config"] + "# another\n",
        {"ConfigMap/controller": ["data.run.yaml"], CONTROLLER: [_HASH], RM: [_HASH], STEPS: [_HASH]},
    ),
    "overrides": (["trainer.seed=77"], in_containers("args", CONTROLLER)),
    "images.controller": ("there/77", in_containers("image", CONTROLLER)),
    "images.reward": ("there/77", in_containers("image", REWARD)),
    "images.learner": ("there/77", in_containers("image", LEARNER, RM, STEPS)),
    "images.rollout": ("there/77", in_containers("image", ROLLOUT)),
    "images.redis": ("there/77", in_containers("image", REDIS, BLOBS)),
    "images.pullPolicy": ("Never", in_containers("imagePullPolicy", *PODS)),
    "images.pullSecrets": (["registry"], in_pods("imagePullSecrets.registry", *PODS)),
    "secrets": (
        "mine",
        both(
            in_pods("volumes.tls.secret.secretName", *PODS),
            in_pods("volumes.token.projected.sources", *PROCESSES),
            in_pods("volumes.password.secret.secretName", REDIS, BLOBS),
            {
                name: [
                    f"spec.podMetricsEndpoints.{rank}.tlsConfig.{file}.name"
                    for rank in range(2 if name == "PodMonitor/learner" else 1)
                    for file in ("ca.secret", "cert.secret", "keySecret")
                ]
                for name in MONITORS
            },
        ),
    ),
    "volumes.models": (CLAIM, in_pods("volumes.models.persistentVolumeClaim.claimName", *PROCESSES)),
    "volumes.data": (CLAIM, in_pods("volumes.data.persistentVolumeClaim.claimName", CONTROLLER)),
    "volumes.checkpoints": (
        CLAIM,
        in_pods("volumes.checkpoints.persistentVolumeClaim.claimName", CONTROLLER, LEARNER),
    ),
    "stopGraceSeconds": (
        77,
        both(
            in_pods("terminationGracePeriodSeconds", *PODS),
            in_containers(_ENV("PACELINE_STOP_GRACE_S"), *PODS),
        ),
    ),
    "lostNodeSeconds": (
        77,
        both(*(in_pods(f"tolerations.{number}.tolerationSeconds", *PODS) for number in range(2))),
    ),
    "controller.storage.size": (
        "77Gi",
        {"PersistentVolumeClaim/controller": ["spec.resources.requests.storage"]},
    ),
    "controller.storage.className": ("fast", {"PersistentVolumeClaim/controller": ["spec.storageClassName"]}),
    "controller.storage.existingClaim": (
        "mine",
        {"PersistentVolumeClaim/controller": [WHOLE]}
        | in_pods("volumes.runs.persistentVolumeClaim.claimName", CONTROLLER),
    ),
    "controller.restarts": (77, {CONTROLLER: ["spec.backoffLimit"]}),
    "controller.resources": (MEMORY, in_containers("resources.limits.memory", CONTROLLER)),
    "controller.disruptionBudget": ({"minAvailable": 1}, {"PodDisruptionBudget/controller": [WHOLE]}),
    "redis.maxMemory": ("77gb", in_containers(_ENV("REDIS_MAX_MEMORY"), REDIS)),
    "redis.storage.size": ("77Gi", {REDIS: ["spec.volumeClaimTemplates.0.spec.resources.requests.storage"]}),
    "redis.storage.className": ("fast", {REDIS: ["spec.volumeClaimTemplates.0.spec.storageClassName"]}),
    "redis.storage.existingClaim": (
        "mine",
        {
            REDIS: [
                "spec.volumeClaimTemplates",
                "spec.persistentVolumeClaimRetentionPolicy",
                f"{POD}.volumes.data",
            ]
        },
    ),
    "redis.resources": (MEMORY, in_containers("resources.limits.memory", REDIS)),
    "redis.disruptionBudget": ({"minAvailable": 1}, {"PodDisruptionBudget/redis": [WHOLE]}),
    "blobs.stores": (
        2,
        both(in_containers(_ENV("PACELINE_BLOB_STORES"), CONTROLLER), {BLOBS: ["spec.replicas"]}),
    ),
    "blobs.maxMemory": ("77gb", in_containers(_ENV("REDIS_MAX_MEMORY"), BLOBS)),
    "blobs.resources": (MEMORY, in_containers("resources.limits.memory", BLOBS)),
    "learner.nodes": (
        7,
        both(
            in_containers("args", CONTROLLER),
            in_containers(_ENV("PET_NNODES"), LEARNER),
            {LEARNER: ["spec.completions", "spec.parallelism"]},
        ),
    ),
    "learner.ranksPerNode": (
        3,
        both(
            in_containers("args", CONTROLLER),
            in_containers(_ENV("PET_NPROC_PER_NODE"), LEARNER),
            in_containers("ports.metrics-2", LEARNER),
            {
                "NetworkPolicy/learner": ["spec.ingress.2.ports.0.endPort"],
                "PodMonitor/learner": ["spec.podMetricsEndpoints.2"],
            },
        ),
    ),
    "learner.gpu": (True, in_containers("resources.limits.nvidia.com/gpu", LEARNER)),
    "learner.restarts": (77, {LEARNER: ["spec.backoffLimitPerIndex"]}),
    "learner.sharedMemory": ("77Gi", in_pods("volumes.shm.emptyDir.sizeLimit", LEARNER)),
    "learner.resources": (MEMORY, in_containers("resources.limits.memory", LEARNER)),
    "learner.disruptionBudget": ({"minAvailable": 2}, {"PodDisruptionBudget/learner": [WHOLE]}),
    "rollout.replicas": (
        3,
        {
            ROLLOUT: ["spec.replicas", "metadata.annotations.paceline/replicas"],
            "ConfigMap/controller": ["data.rollout_replicas"],
        },
    ),
    "rollout.gpus": (7, in_containers("resources.limits.nvidia.com/gpu", ROLLOUT)),
    "rollout.sharedMemory": ("77Gi", in_pods("volumes.shm.emptyDir.sizeLimit", ROLLOUT)),
    "rollout.resources": (MEMORY, in_containers("resources.limits.memory", ROLLOUT)),
    "rollout.disruptionBudget": ({"maxUnavailable": 1}, {"PodDisruptionBudget/rollout": [WHOLE]}),
    "rollout.autoscale.enabled": (False, {"ScaledObject/rollout": [WHOLE]}),
    "rollout.autoscale.min": (2, {"ScaledObject/rollout": ["spec.minReplicaCount"]}),
    "rollout.autoscale.max": (77, {"ScaledObject/rollout": ["spec.maxReplicaCount"]}),
    "rollout.autoscale.prompts": (77, {"ScaledObject/rollout": ["spec.triggers.0.metadata.threshold"]}),
    "rollout.autoscale.holdSeconds": (
        77,
        {
            "ScaledObject/rollout": [
                "spec.advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.stabilizationWindowSeconds"
            ]
        },
    ),
    "rollout.autoscale.prometheus": (
        "http://there",
        {"ScaledObject/rollout": ["spec.triggers.0.metadata.serverAddress"]},
    ),
    "reward.replicas": (3, {REWARD: ["spec.replicas", "metadata.annotations.paceline/replicas"]}),
    "reward.resources": (MEMORY, in_containers("resources.limits.memory", REWARD)),
    "reward.disruptionBudget": ({"maxUnavailable": 1}, {"PodDisruptionBudget/reward": [WHOLE]}),
    # The rule comes before that of who scrapes.
    "reward.callers": (PLACE, {"NetworkPolicy/reward": ["spec.ingress.1", "spec.ingress.2"]}),
    # rm has a limit of its own.
    "rewardModels.resources": (MEMORY, in_containers("resources.limits.memory", STEPS)),
    "rewardModels.named.steps": ({"resources": MEMORY}, in_containers("resources.limits.memory", STEPS)),
    "network.policies": (
        False,
        {f"NetworkPolicy/{name}": [WHOLE] for name in ("redis", "blobs", "reward-model")}
        | {name: [WHOLE] for name in POLICIES},
    ),
    "network.dns": (
        [{"to": PLACE}],
        {
            name: ["spec.egress.0.to", "spec.egress.0.ports"]
            for name in [*POLICIES, *(f"NetworkPolicy/{name}" for name in ("redis", "blobs", "reward-model"))]
        },
    ),
    "network.egress": (
        [{"to": PLACE}],
        {
            f"NetworkPolicy/{name}": [f"spec.egress.{number}"]
            for name, number in (
                ("controller", 6), ("learner", 6), ("rollout", 6), ("reward", 4), ("reward-model", 2)
            )
        },
    ),
    "metrics.port": (
        7777,
        both(
            _METRICS,
            in_containers("ports.metrics-1.containerPort", LEARNER),
            {
                f"NetworkPolicy/{name}": [f"spec.ingress.{at}.ports.0.{end}" for end in ("port", "endPort")]
                for name, at in (("controller", 1), ("learner", 2), ("rollout", 2), ("reward", 1))
            },
        ),
    ),
    "metrics.scrapers": (
        PLACE,
        {
            f"NetworkPolicy/{name}": [f"spec.ingress.{at}.from.0.ipBlock.cidr"]
            for name, at in (("controller", 1), ("learner", 2), ("rollout", 2), ("reward", 1))
        },
    ),
    "metrics.podMonitors.enabled": (False, {name: [WHOLE] for name in MONITORS}),
    "metrics.podMonitors.labels": (
        {"release": "77"},
        {name: ["metadata.labels.release"] for name in MONITORS},
    ),
    "metrics.podMonitors.interval": (
        "77s",
        {name: ["spec.podMetricsEndpoints.0.interval"] for name in MONITORS}
        | {"PodMonitor/learner": [f"spec.podMetricsEndpoints.{rank}.interval" for rank in range(2)]},
    ),
    "metrics.rules.enabled": (False, {"PrometheusRule/monitoring": [WHOLE]}),
    "metrics.rules.labels": ({"release": "77"}, {"PrometheusRule/monitoring": ["metadata.labels.release"]}),
    "metrics.dashboards.enabled": (False, {"ConfigMap/dashboards": [WHOLE]}),
    "metrics.dashboards.labels": ({"part": "77"}, {"ConfigMap/dashboards": ["metadata.labels.part"]}),
    "metrics.dashboards.annotations": ({"folder": "77"}, {"ConfigMap/dashboards": ["metadata.annotations"]}),
    "metrics.dashboards.datasource": (
        "mimir",
        {"ConfigMap/dashboards": [f"data.paceline-{name}.json" for name in ("services", "training")]},
    ),
}  # fmt: skip
# The same beside a Redis of the user's own.
EXTERNALLY: dict[str, tuple[Any, dict[str, list[str]]]] = {
    "redis.external.url": (
        "rediss://other@redis:7777/0",
        both(
            in_containers(_ENV("PACELINE_BROKER_URL"), CONTROLLER),
            {name: ["spec.egress.1.ports.0.port"] for name in POLICIES},
        ),
    ),
    "redis.external.passwordSecret": ("mine", in_pods("volumes.token.projected.sources", CONTROLLER)),
    "redis.external.caSecret": ("mine", in_pods("volumes.redis-ca.secret.secretName", *SERVICES)),
    "redis.external.to": (PLACE, {name: ["spec.egress.1.to.0.ipBlock.cidr"] for name in POLICIES}),
}

COMPONENTS = {
    "controller": ([CONTROLLER], "controller.pod"),
    "learner": ([LEARNER], "learner.pod"),
    "rollout": ([ROLLOUT], "rollout.pod"),
    "reward": ([REWARD], "reward.pod"),
    "redis": ([REDIS], "redis.pod"),
    "blobs": ([BLOBS], "blobs.pod"),
    "models": ([RM, STEPS], "rewardModels.pod"),
}
# Where a setting of pods is in a template, and its value with a text of the component's own.
SETTINGS: dict[str, tuple[str, Any]] = {
    "labels": ("metadata.labels", {"owner": "OWN"}),
    "annotations": ("metadata.annotations", {"owner": "OWN"}),
    "env": ("container.env", {"OWNER": "OWN"}),
    "envFrom": ("container.envFrom", [{"secretRef": {"name": "OWN"}}]),
    "nodeSelector": ("spec.nodeSelector", {"pool": "OWN"}),
    "tolerations": ("spec.tolerations", [{"key": "OWN", "operator": "Exists"}]),
    "affinity": ("spec.affinity", {"podAffinity": {"OWN": []}}),
    "topologySpreadConstraints": ("spec.topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "OWN"}]),
    "serviceAccountName": ("spec.serviceAccountName", "OWN"),
    "priorityClassName": ("spec.priorityClassName", "OWN"),
    "runtimeClassName": ("spec.runtimeClassName", "OWN"),
    "schedulerName": ("spec.schedulerName", "OWN"),
    "volumes": ("spec.volumes", [{"name": "OWN", "emptyDir": {}}]),
    "volumeMounts": ("container.volumeMounts", [{"name": "OWN", "mountPath": "/own"}]),
    "podSecurityContext": ("spec.securityContext", {"seLinuxOptions": {"level": "OWN"}}),
    "securityContext": ("container.securityContext", {"seLinuxOptions": {"level": "OWN"}}),
}
