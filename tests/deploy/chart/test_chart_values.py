"""Every value of the chart has an effect, and no other one than expected.

Each value is changed alone, and all that differs in the manifests is compared.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.chart import FOLDER, Manifest, render, write
from support.chart_values import BASE, COMPONENTS, EFFECTS, EXTERNAL, EXTERNALLY, SETTINGS, WHOLE

pytestmark = pytest.mark.timeout(900)


def flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Leaves of a manifest by their paths; what has a name is found by it, and arguments are one leaf."""
    if isinstance(value, dict) and value:
        parts = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list) and value and path[-1:] not in (("args",), ("sources",)):
        parts = [
            (each["name"] if isinstance(each, dict) and "name" in each else str(number), each)
            for number, each in enumerate(value)
        ]
    else:
        yield path, value
        return
    for key, each in parts:
        yield from flat(each, (*path, key))


def leaves(manifests: dict[tuple[str, str], Manifest]) -> dict[str, dict[str, Any]]:
    """Leaves by object and path; the hash in a Job's name is none of its contents."""
    made = {}
    for (kind, name), each in manifests.items():
        generation = each["metadata"]["name"].rpartition("-")[2] if kind == "Job" else None
        text = json.dumps(each)
        plain = json.loads(text.replace(generation, "GENERATION") if generation else text)
        made[f"{kind}/{name}"] = {".".join(path): value for path, value in flat(plain)}
    return made


def changed(base: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Values with another one under a dotted key."""
    made = copy.deepcopy(base)
    *folders, last = key.split(".")
    at = made
    for name in folders:
        at = at.setdefault(name, {})
    at[last] = value
    return made


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    """Leaves of the two sets of values, by where Redis is."""
    folder = tmp_path_factory.mktemp("values")
    return {
        name: leaves(render(write(values, folder)))
        for name, values in (("own", BASE), ("external", EXTERNAL))
    }


@pytest.mark.parametrize("key", [*EFFECTS, *EXTERNALLY])
def test_a_value_changes_what_it_is_for_and_nothing_else(
    key: str, before: dict[str, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    own = key in EFFECTS
    value, expected = (EFFECTS if own else EXTERNALLY)[key]
    former = before["own" if own else "external"]
    made = leaves(render(write(changed(BASE if own else EXTERNAL, key, value), tmp_path)))
    differs: dict[str, set[str]] = {}
    new: list[str] = []
    for name in sorted(former.keys() | made.keys()):
        if (name in former) != (name in made):
            differs[name] = {WHOLE}
            continue
        paths = {
            path
            for path in former[name].keys() | made[name].keys()
            if former[name].get(path) != made[name].get(path)
        }
        # As deep as the table says.
        known = {
            path: next((each for each in expected.get(name, ()) if below(path, each)), path) for path in paths
        }
        if paths:
            differs[name] = set(known.values())
            new += [str(made[name].get(path)) for path in paths]
    assert differs == {name: set(paths) for name, paths in expected.items()}
    if not isinstance(value, dict | list | bool) and any(WHOLE not in paths for paths in expected.values()):
        assert any(str(value).strip() in each for each in new), new


def below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}.")


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_a_components_pod_reaches_its_own_pods_only(setting: str, tmp_path: Path) -> None:
    place, value = SETTINGS[setting]
    values = BASE
    for component, (_, key) in COMPONENTS.items():
        own = json.loads(json.dumps(value).replace("OWN", f"own-{component}"))
        values = changed(values, f"{key}.{setting}", own)
    made = {f"{kind}/{name}": each for (kind, name), each in render(write(values, tmp_path)).items()}
    for component, (names, _) in COMPONENTS.items():
        for name in names:
            template = made[name]["spec"]["template"]
            (only,) = template["spec"]["containers"]
            part: Any = template | {"container": only}
            for word in place.split("."):
                part = part[word]
            assert f"own-{component}" in json.dumps(part), name
            others = {f'"own-{other}"' for other in COMPONENTS.keys() - {component}}
            assert not [other for other in others if other in json.dumps(made[name])], name


def test_every_value_is_in_these_tables() -> None:
    """Those of values.yaml, and those that its schema allows."""
    settings = set(SETTINGS)
    pod_keys = {key for _, key in COMPONENTS.values()} | {"pods"}
    known = {*EFFECTS, *EXTERNALLY, "rewardModels.named", "global"} | pod_keys

    def missing(value: Any, path: str = "") -> Iterator[str]:
        if path in pod_keys:
            yield from (f"{path}.{name}" for name in value.keys() - settings)
        elif path not in known:
            if not isinstance(value, dict) or not value:
                yield path
            for name, each in value.items() if isinstance(value, dict) else ():
                yield from missing(each, f"{path}.{name}".removeprefix("."))

    schema = json.loads((FOLDER / "paceline" / "values.schema.json").read_text())

    def allowed(part: dict[str, Any]) -> Any:
        if "$ref" in part:
            part = schema["definitions"][part["$ref"].rpartition("/")[2]]
        return {name: allowed(each) for name, each in part.get("properties", {}).items()}

    assert list(missing(yaml.safe_load((FOLDER / "paceline" / "values.yaml").read_text()))) == []
    assert list(missing(allowed(schema))) == []
    assert settings == allowed(schema["definitions"]["pod"]).keys()
