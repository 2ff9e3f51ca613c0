"""The chart's pods: ranks, rights, secrets, ends, and what the values give them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509

from paceline.core.errors import EXIT_FAILED, EXIT_FINAL, EXIT_GIVEN
from paceline.launch import container
from paceline.service.member.runtime import STOP_GRACE
from support.chart import (
    MANY,
    MODELS,
    POD,
    Manifest,
    environment,
    pods,
    render,
    secrets_of,
    write,
)

pytestmark = pytest.mark.timeout(900)


def test_every_rank_of_the_learner_has_its_number(many: dict[tuple[str, str], Manifest]) -> None:
    job = many["Job", "learner"]["spec"]
    # Only an indexed job numbers its pods.
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    pod = job["template"]["spec"]
    (number,) = (each for each in pod["containers"][0]["env"] if each["name"] == "PET_NODE_RANK")
    path = number["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    places = [
        place
        for node in range(3)
        for place in container.ranks(environment(pod) | {"PET_NODE_RANK": str(node)})
    ]
    assert [place["RANK"] for place in places] == [str(rank) for rank in range(6)]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1"] * 3
    # The name that a pod of an indexed job has under its headless service.
    name = many["Job", "learner"]["metadata"]["name"]
    assert {place["MASTER_ADDR"] for place in places} == {f"{name}-0.{pod['subdomain']}"}
    service = many["Service", "learner"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_every_pod_knows_how_long_kubernetes_waits_for_its_end(tmp_path: Path) -> None:
    """One that believed in more would be killed before it has saved."""
    pods = [
        manifest["spec"]["template"]["spec"]
        for manifest in render(write(MODELS | {"stopGraceSeconds": 1234}, tmp_path)).values()
        if "template" in manifest.get("spec", ())
    ]
    assert len(pods) == 7
    for pod in pods:
        (container,) = pod["containers"]
        (told,) = [each["value"] for each in container["env"] if each["name"] == STOP_GRACE]
        assert (told, pod["terminationGracePeriodSeconds"]) == ("1234", 1234)


def test_jobs_end_where_a_new_pod_would_not_mend_the_end(many: dict[tuple[str, str], Manifest]) -> None:
    final = {
        name: next(
            rule["onExitCodes"]["values"]
            for rule in many["Job", name]["spec"]["podFailurePolicy"]["rules"]
            if rule["action"] == "FailJob"
        )
        for name in ("controller", "learner")
    }
    assert final == {
        "controller": sorted([EXIT_FAILED, EXIT_GIVEN, EXIT_FINAL]),
        "learner": sorted([EXIT_GIVEN, EXIT_FINAL]),
    }


def test_a_pod_has_no_more_rights_than_it_needs(many: dict[tuple[str, str], Manifest]) -> None:
    for name, pod in pods(many):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (only,) = pod["containers"]
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert set(only["resources"]) == {"requests", "limits"}
        assert "readinessProbe" in only
        assert "PACELINE_INSECURE" not in environment(pod)


def test_the_script_prints_every_secret_that_a_pod_mounts(
    many: dict[tuple[str, str], Manifest], secrets: dict[str, dict[str, bytes]]
) -> None:
    mounted = set()
    for _, pod in pods(many):
        for name, wanted in secrets_of(pod):
            mounted.add(name)
            assert (wanted or {"ca.pem", "key.pem"}) <= secrets[name].keys()
    assert mounted == secrets.keys() - {"paceline-tls-client"}
    # Redis' clients check the name by which they reach it.
    certificate = x509.load_pem_x509_certificate(secrets["paceline-tls-redis"]["cert.pem"])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    told = environment(next(pod for name, pod in pods(many) if name == "controller"))
    for url in (told["PACELINE_BROKER_URL"], *told["PACELINE_BLOB_STORES"].split()):
        host = url.partition("@")[2].partition(":")[0]
        assert host in names.get_values_for_type(x509.DNSName)
        assert ("Service", host.rpartition(".")[2].removeprefix("run-")) in many
    assert secrets["paceline-tls-redis"]["users.acl"].startswith(b"user default off ")
    assert secrets["paceline-tls-redis"]["users.acl"].splitlines()[1].startswith(b"user paceline on #")


def test_every_pod_has_what_the_values_give_it(
    every: dict[tuple[str, str], Manifest], tmp_path: Path
) -> None:
    """In `pods`, or in the component's own `pod`; Redis, which `every` has elsewhere, only the latter."""
    own = render(write(MODELS | {"redis": {"pod": POD}, "metrics": {}}, tmp_path))
    workloads = [(key, each) for key, each in every.items() if "template" in each.get("spec", ())]
    assert len(workloads) == 6
    for (_, name), manifest in [*workloads, (("StatefulSet", "redis"), own["StatefulSet", "redis"])]:
        template, pod = manifest["spec"]["template"], manifest["spec"]["template"]["spec"]
        (container_,) = pod["containers"]
        for metadata in (manifest["metadata"], template["metadata"]):
            assert POD["labels"].items() <= metadata["labels"].items(), name
            assert POD["annotations"].items() <= metadata["annotations"].items(), name
        for key in ("serviceAccountName", "priorityClassName", "runtimeClassName", "schedulerName"):
            assert pod[key] == POD[key], (name, key)
        assert POD["nodeSelector"].items() <= pod["nodeSelector"].items()
        assert pod["topologySpreadConstraints"] == POD["topologySpreadConstraints"]
        assert pod["tolerations"][-1:] == POD["tolerations"]
        wanted = POD["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        required = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert required[-1:] == wanted
        assert {"name": "HTTPS_PROXY", "value": "http://proxy"} in container_["env"]
        assert {"name": "PART"} | POD["env"]["PART"] in container_["env"]
        assert container_["envFrom"] == POD["envFrom"]
        assert POD["volumes"][0] in pod["volumes"]
        assert POD["volumeMounts"][0] in container_["volumeMounts"]
        assert pod["securityContext"]["fsGroup"] == 1000650000
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container_["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    for (kind, name), manifest in own.items():
        if kind in ("Job", "Deployment"):
            assert "HTTPS_PROXY" not in environment(manifest["spec"]["template"]["spec"]), name
    (redis,) = (pod for name, pod in pods(render(write(MODELS | {"pods": POD}, tmp_path))) if name == "redis")
    assert "envFrom" not in redis["containers"][0]
    assert "HTTPS_PROXY" not in environment(redis)
    assert POD["volumes"][0] not in redis["volumes"]


def test_a_components_own_settings_come_on_top_of_those_of_all(tmp_path: Path) -> None:
    values = MANY | {"pods": {"nodeSelector": {"pool": "any", "zone": "a"}, "tolerations": [{"key": "a"}]}}
    made = render(write(values, tmp_path))
    controller, learner, reward = (
        made[key]["spec"]["template"]["spec"]
        for key in (("Job", "controller"), ("Job", "learner"), ("Deployment", "reward"))
    )
    assert controller["nodeSelector"] == {"pool": "cpu", "zone": "a"}
    assert reward["nodeSelector"] == {"pool": "any", "zone": "a"}
    assert learner["tolerations"][2:] == [{"key": "a"}, *MANY["learner"]["pod"]["tolerations"]]


def test_a_pod_of_a_lost_node_is_given_up_after_a_minute(many: dict[tuple[str, str], Manifest]) -> None:
    for name, pod in pods(many):
        seconds = {each["key"]: each.get("tolerationSeconds") for each in pod["tolerations"][:2]}
        assert seconds == {"node.kubernetes.io/not-ready": 60, "node.kubernetes.io/unreachable": 60}, name


def test_a_lost_nodes_pod_is_made_anew_as_its_kind_allows(many: dict[tuple[str, str], Manifest]) -> None:
    """A Deployment's at once; a Job's once the lost one is known to be gone, which is no failure."""
    replaced = {}
    for (kind, name), manifest in many.items():
        spec = manifest.get("spec", {})
        if "template" not in spec:
            continue
        pod = spec["template"]["spec"]
        claims = {
            each["persistentVolumeClaim"]["claimName"]
            for each in pod["volumes"]
            if "persistentVolumeClaim" in each
        }
        if kind == "Job":
            ignored, *_ = spec["podFailurePolicy"]["rules"]
            assert ignored == {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            }, name
            assert (pod["restartPolicy"], spec["podReplacementPolicy"]) == ("Never", "Failed"), name
            replaced[name] = "when the lost one is gone"
        elif kind == "Deployment":
            # None has a volume that only one node may use.
            assert claims <= {"models"}, name
            assert "nodeName" not in pod, name
            replaced[name] = "at once"
        else:
            assert spec["replicas"] == {"redis": 1, "blobs": 2}[name]
            replaced[name] = "when the lost one is gone"
    gone, once = "when the lost one is gone", "at once"
    assert replaced == {
        **dict.fromkeys(("controller", "learner", "redis", "blobs"), gone),
        **dict.fromkeys(("rollout", "reward"), once),
    }
    # Two controllers never write to one run directory, whatever the cluster believes of a node.
    assert many["PersistentVolumeClaim", "controller"]["spec"]["accessModes"] == ["ReadWriteOncePod"]
