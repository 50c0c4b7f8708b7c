"""Cloud jobs: manifests by their schemas, scripts with stand-ins for what clouds bring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxinfer.cli.settings import read_settings

ROOT = Path(__file__).parents[2]
# Cut from the CRDs of JobSet 0.12 and LeaderWorkerSet 0.10 to the fields that manifests here may use.
SCHEMAS = json.loads((ROOT / "tests" / "data" / "crds.json").read_text())
SERVICE = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["selector", "ports"],
            "additionalProperties": False,
            "properties": {
                "selector": {"type": "object", "additionalProperties": {"type": "string"}},
                "ports": {"type": "array", "items": {"type": "object", "required": ["port"]}},
            },
        }
    },
}
MANIFESTS = sorted((ROOT / "configs").glob("gke_*.yaml"))
CLOUDS = ("tpu_v5e_8", "tpu_v6e_8", "tpu_v5p_16", "gpu_8x")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def schema_of(document: dict[str, Any]) -> dict[str, Any]:
    kind = f"{document['apiVersion']} {document['kind']}"
    return SERVICE if kind == "v1 Service" else SCHEMAS[kind]


def pods(value: Any) -> list[dict[str, Any]]:
    """Returns the pod specifications in a document."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods(item)]
    if not isinstance(value, dict):
        return []
    return [value] if "containers" in value else [pod for item in value.values() for pod in pods(item)]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_keep_their_schemas_and_open_with_their_command(path: Path):
    lines = path.read_text().splitlines()
    assert lines[0] == f"# kubectl apply -f configs/{path.name}"
    head = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
    assert "To expect: " in head
    assert "NOT RUN on a cluster" in head
    for document in documents(path):
        jsonschema.validate(document, schema_of(document))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_name_what_there_is(path: Path):
    """Volumes that are mounted, configurations of the image, flags of the command."""
    (pod,) = [pod for document in documents(path) for pod in pods(document)]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    command, *flags = container["args"]
    named = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    config = ROOT / named.pop("config").removeprefix("/")
    assert read_settings(str(config), []).run["mesh"]
    helped = subprocess.run(
        [sys.executable, "-m", "jaxinfer", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    for name in named:
        assert f"--{name} " in helped


def test_a_service_finds_the_leader():
    group, service = documents(ROOT / "configs" / "gke_lws.yaml")
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/name"] == group["metadata"]["name"]
    (container,) = pods(group)[0]["containers"]
    ports = [port["containerPort"] for port in container["ports"]]
    (config,) = [flag.split("=")[1] for flag in container["args"] if flag.startswith("--config")]
    port = tomllib.loads((ROOT / config.removeprefix("/")).read_text())["server"]["port"]
    assert port in ports
    assert service["spec"]["ports"][0]["targetPort"] == port


@pytest.mark.parametrize("wrong", [{"image": 3}, {"imagee": "x"}])
def test_the_schemas_bite(wrong: dict[str, Any]):
    (document,) = documents(ROOT / "configs" / "gke_jobset.yaml")
    pods(document)[0]["containers"][0].update(wrong)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema_of(document))


@pytest.mark.parametrize("name", CLOUDS)
def test_clouds_say_what_to_expect_and_that_they_have_not_run(name: str):
    head = (ROOT / "configs" / f"{name}.toml").read_text().split("[model]")[0].replace("\n# ", " ")
    for words in ("To expect: ", "NOT RUN on the device", "jaxinfer compile --target "):
        assert words in head


def run_with(stand_in: str, folder: Path, command: Sequence[str], **env: str) -> tuple[int, list[str], str]:
    """Runs a script with a stand-in on its path; returns its code, the stand-in's calls and what it complained of."""
    path, calls = folder / stand_in, folder / "calls"
    path.write_text(f'#!/bin/sh\necho "$*" >> {calls}\ncase "$*" in *describe*) exit $DESCRIBE ;; esac\n')
    path.chmod(0o755)
    calls.touch()
    given = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | env
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=given, check=False)
    return done.returncode, calls.read_text().splitlines(), done.stderr


@pytest.mark.parametrize("there", [False, True])
def test_a_tpu_vm_is_made_once_and_serves(tmp_path: Path, there: bool):
    command = ["scripts/tpu_vm.sh", "mine", "here", "v6e-8", "configs/tpu_v6e_8.toml"]
    code, calls, _ = run_with(
        "gcloud", tmp_path, command, DESCRIBE="0" if there else "1", HF_TOKEN="hf_secret"
    )
    assert code == 0
    said = "\n".join(calls)
    assert "hf_secret" not in said
    assert (
        "tpu-vm create mine --accelerator-type v6e-8 --version v2-alpha-tpuv6e --zone here" in said
    ) != there
    assert "tpu-vm scp" in said
    assert calls[-1].endswith("jaxinfer serve --config configs/tpu_v6e_8.toml --zone here")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["mine", "here", "v4-8", "configs/tpu_v6e_8.toml"],
            "TYPE: got v4-8, must be v5litepod-N, v6e-N or v5p-N",
        ),
        (["mine", "here", "v6e-8", "configs/none.toml"], "usage: scripts/tpu_vm.sh"),
        (["mine"], "usage: scripts/tpu_vm.sh"),
    ],
)
def test_a_wrong_tpu_vm_is_refused_before_anything_is_made(tmp_path: Path, args: list[str], says: str):
    code, calls, complaint = run_with("gcloud", tmp_path, ["scripts/tpu_vm.sh", *args], DESCRIBE="0")
    assert (code, calls) == (2, [])
    assert says in complaint


def test_slurm_serves_a_configuration(tmp_path: Path):
    code, calls, _ = run_with("srun", tmp_path, ["scripts/serve.slurm", "configs/gpu_8x.toml"])
    assert code == 0
    assert calls == ["--kill-on-bad-exit=1 .venv/bin/jaxinfer serve --config configs/gpu_8x.toml"]
    code, calls, complaint = run_with("srun", tmp_path, ["scripts/serve.slurm"])
    assert code == 2
    assert "usage: sbatch scripts/serve.slurm" in complaint
