"""What is in docker/: right by its linters and schemas, in step with pyproject, and shut without its secrets."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import ranksearch

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted(p for p in (DOCKER / "bin").iterdir() if os.access(p, os.X_OK))


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"PATH": path} | variables
    )


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed (pip install 'ranksearch[deploy]')")
    return found


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(value: object) -> list[dict[str, Any]]:
    """Every pod template in a manifest, wherever it stands."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods(item)]
    if not isinstance(value, dict):
        return []
    own = [value] if isinstance(value.get("spec"), dict) and "containers" in value["spec"] else []
    return own + [pod for item in value.values() for pod in pods(item)]


def test_the_dockerfile_passes_its_linter() -> None:
    done = run(tool("hadolint"), DOCKER / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_the_compose_files_follow_the_compose_schema() -> None:
    files = sorted(DOCKER.glob("compose*.yaml"))
    done = run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)
    assert len(files) == 2 and done.returncode == 0, done.stdout


def test_every_yaml_file_passes_its_linter() -> None:
    done = run(tool("yamllint"), "--strict", "-c", ROOT / ".yamllint", DOCKER)
    assert done.returncode == 0, done.stdout


def test_the_start_scripts_pass_shellcheck() -> None:
    done = run(tool("shellcheck"), "--shell=sh", "--external-sources", f"--source-path={DOCKER / 'bin'}", *SCRIPTS)
    assert len(SCRIPTS) == 6 and done.returncode == 0, done.stdout


def test_every_start_script_ends_at_the_first_error() -> None:
    for script in SCRIPTS:
        lines = script.read_text().splitlines()
        assert lines[0] == "#!/bin/sh" and "set -eu" in lines, script.name


def test_manifests_and_their_pods_are_valid_kubernetes(tmp_path: Path) -> None:
    validate = tool("kubernetes-validate")
    checked = 0
    for document in (d for path in MANIFESTS for d in documents(path)):
        parts = [document]
        if document["apiVersion"].startswith("ray.io/"):
            # KubeRay's own kinds have no schema here; the pods that they are made of do.
            parts = [
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": "pod"} | p.get("metadata", {}),
                    "spec": p["spec"],
                }
                for p in pods(document)
            ]
        for part in parts:
            path = tmp_path / "part.json"
            path.write_text(json.dumps(part))
            done = run(validate, "--strict", path)
            assert done.returncode == 0, done.stdout + done.stderr
            checked += 1
    assert checked == 11


def test_every_container_is_without_rights_and_with_a_read_only_root() -> None:
    containers = 0
    for pod in (p for path in MANIFESTS for d in documents(path) for p in pods(d)):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in pod["spec"]["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True and rights["capabilities"] == {"drop": ["ALL"]}
            assert rights["allowPrivilegeEscalation"] is False
            containers += 1
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("${BIND:-127.0.0.1}:") for port in service.get("ports", [])), name
        assert service["healthcheck"]["test"] and service["restart"] == "unless-stopped", name
    assert containers == 6 and len(compose["services"]) == 4
    assert re.search(r"^USER (?!0|root)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)


def test_the_pins_of_the_images_are_what_pyproject_allows() -> None:
    pins = dict(
        line.split("==")
        for line in (DOCKER / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["server"]]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement
    python = re.search(r"^ARG PYTHON=([\d.]+)-", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert python and SpecifierSet(PROJECT["requires-python"]).contains(python[1])
    (cluster,) = [d for d in documents(DOCKER / "kubernetes" / "raycluster.yaml") if d["kind"] == "RayCluster"]
    assert cluster["spec"]["rayVersion"] == pins["ray"]


def test_every_image_that_is_named_is_of_this_version_or_pinned() -> None:
    texts = {p.name: p.read_text() for p in (*MANIFESTS, *DOCKER.glob("compose*.yaml"), DOCKER / "Dockerfile")}
    ours = [tag for text in texts.values() for tag in re.findall(r"\branksearch:([\w.$]+)-", text)]
    assert len(ours) >= 6 and set(ours) == {ranksearch.__version__}
    assert f'image.version="{ranksearch.__version__}"' in texts["Dockerfile"]
    others = {i for text in texts.values() for i in re.findall(r"image: *(?!ranksearch:)(\S+)", text)}
    assert others == {"postgres:15.14-bookworm"}


@pytest.mark.parametrize("script", ["start-postgres", "start-mlflow", "start-head", "start-worker"])
def test_a_missing_secret_ends_the_start_with_a_message(tmp_path: Path, script: str) -> None:
    here = {"SECRETS": str(tmp_path), "PGDATA": str(tmp_path / "data"), "ARTIFACTS": str(tmp_path / "artifacts")}
    done = run(DOCKER / "bin" / script, RANKSEARCH_HOME=str(tmp_path / "home"), **here)
    assert done.returncode == 1 and "is missing or empty" in done.stderr and "make-secrets" in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ray_token").write_text("hunter2")
    done = run(DOCKER / "bin" / "start-worker", SECRETS=str(tmp_path), RANKSEARCH_HOME=str(tmp_path / "home"))
    assert done.returncode == 1 and "16 characters" in done.stderr and "hunter2" not in done.stderr


def test_secrets_are_made_once_each_different_and_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert run(DOCKER / "bin" / "make-secrets", folder).returncode == 0
    before = {p.name: p.read_text() for p in folder.iterdir()}
    assert len(before) == 4 == len(set(before.values())) and all(len(text) == 64 for text in before.values())
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "ray_token").unlink()
    assert run(DOCKER / "bin" / "make-secrets", folder).returncode == 0
    after = {p.name: p.read_text() for p in folder.iterdir()}
    assert after.pop("ray_token") != before.pop("ray_token") and after == before


def test_a_home_that_is_not_absolute_is_refused(tmp_path: Path) -> None:
    run(DOCKER / "bin" / "make-secrets", tmp_path / "secrets")
    done = run(DOCKER / "bin" / "start-head", SECRETS=str(tmp_path / "secrets"), RANKSEARCH_HOME="data")
    assert done.returncode == 1 and "absolute path" in done.stderr
