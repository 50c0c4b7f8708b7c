"""The arguments of a Serve configuration, and the one in configs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed")

import yaml
from ray.serve.schema import ServeDeploySchema

from jaxinfer.cli.flags import UsageError
from jaxinfer.replicas.app import ReplicaConfig, app

ROOT = Path(__file__).parents[2]


def test_the_configuration_in_configs_is_one_that_serve_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)  # its paths are from there
    path = ROOT / "configs" / "ray.yaml"
    assert path.read_text().startswith("# serve run configs/ray.yaml\n")
    given = yaml.safe_load(path.read_text())
    (one,) = ServeDeploySchema.model_validate(given).applications
    assert one.import_path == "jaxinfer.replicas.app:app"
    assert app(one.args) is not None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"replicas": 2}, "args: got replicas, there are config, set, min_replicas"),
        ({"set": "model.name=x"}, "args.set: got 'model.name=x', must be a list"),
        ({"min_replicas": 0}, "args.min_replicas: got 0, must be a whole number of at least 1"),
        ({"max_replicas": True}, "args.max_replicas: got True"),
        (
            {"min_replicas": 3, "max_replicas": 2},
            "args.min_replicas: got 3, must be at most max_replicas = 2",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(given: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        ReplicaConfig.read(given)


@pytest.mark.parametrize(
    ("setting", "says"),
    [("model.modell=x", "no key 'modell'"), ("sampling.top_p=2", r"sampling\.top_p: got 2")],
)
def test_a_wrong_setting_is_refused_before_a_replica_starts(setting: str, says: str):
    with pytest.raises(UsageError, match=says):
        app({"set": [setting]})
