"""Names of devices, and models' configurations without weights."""

import json

import pytest

from jaxinfer.aot.models import PRESETS, read_model
from jaxinfer.aot.targets import CHIPS, Target, gpu_description


@pytest.mark.parametrize(
    ("text", "platform", "chip", "topology", "count"),
    [
        ("tpu:v6e:2x4", "tpu", "v6e", (2, 4), 8),
        ("TPU:V5P:2x2x2", "tpu", "v5p", (2, 2, 2), 8),
        ("tpu:v5p", "tpu", "v5p", (1,), 1),
        ("gpu:h100", "gpu", "h100", (1, 1, 1), 1),
        ("gpu:a100:8", "gpu", "a100", (1, 1, 8), 8),
        ("gpu:h200:1x2x8", "gpu", "h200", (1, 2, 8), 16),
    ],
)
def test_a_target_is_read(text, platform, chip, topology, count):
    target = Target.parse(text)
    assert (target.platform, target.chip, target.topology, target.num_devices) == (
        platform,
        chip,
        topology,
        count,
    )
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "text",
    ["", "v6e", "tpu:v9", "gpu:v6e", "tpu:h100", "tpu:v6e:2x2x2", "tpu:v5p:2x4", "gpu:h100:0", "tpu:v6e:x"],
)
def test_another_target_is_refused(text):
    with pytest.raises(ValueError, match="target: got"):
        Target.parse(text)


def test_gpus_are_described_for_cudas_compiler():
    for chip in CHIPS.values():
        if chip.gpu is None:
            with pytest.raises(ValueError, match="TPU"):
                gpu_description(chip)
        else:
            text = gpu_description(chip)
            assert f"device_memory_size: {chip.memory_bytes:.0f}" in text
            assert text.count("{") == text.count("}")


def test_a_model_is_read_from_its_configuration_alone(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS["llama-3-8b"] | {"num_hidden_layers": 3}))
    cfg = read_model(str(path))
    assert (cfg.num_layers, cfg.d_model, cfg.attention.head_dim, cfg.mlp.ffn_dim) == (3, 4096, 128, 14336)
    assert read_model("Llama-3-70B").num_layers == 80
