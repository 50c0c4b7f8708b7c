"""The mesh's string, and the table from logical axes to mesh axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxinfer.arrays import sharding
from jaxinfer.arrays.sharding import AXES, RULES, describe_mesh, num_shards, parse_mesh, partition, shardings
from jaxinfer.arrays.specs import ParamSpec


def test_no_string_is_no_mesh_and_axes_left_out_are_one_way():
    assert parse_mesh("") is None
    mesh = parse_mesh("tensor=1")
    assert mesh is not None
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1)
    assert describe_mesh(mesh) == "tensor=1"
    assert num_shards("rows", "vocab", mesh=mesh) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tensr=2", "axis 'tensr' .* is unknown; axes: data, stage, expert, tensor"),
        ("tensor=2,tensor=2", "is named twice"),
        ("tensor", "got 'tensor', must be a whole number"),
        ("tensor=0", "got 'tensor=0', must be a whole number"),
        ("data=x", "got 'data=x'"),
        ("tensor=4,data=1000", "takes 4000 devices, there are"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(text: str, says: str):
    with pytest.raises(ValueError, match=says):
        parse_mesh(text)


def test_an_array_lies_as_its_axes_say_and_a_scale_of_all_inputs_is_whole():
    assert partition(("embed", "ffn")) == PartitionSpec(None, ("tensor",))
    assert partition(("ffn", "embed"), (8, 1)) == PartitionSpec(("tensor",), None)
    assert partition(("embed", "ffn"), (8, 1)) == PartitionSpec(None, None)
    assert partition(("rows", None)) == PartitionSpec(("data", "expert"), None)


def test_an_axis_without_a_rule_or_two_for_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match="no rule for the logical axis 'colour'"):
        partition(("heads", "colour"))
    with pytest.raises(ValueError, match=r"'heads' and 'ffn' of .* both claim the mesh axis 'tensor'"):
        partition(("heads", "ffn"))


def test_shardings_are_a_map_over_descriptions():
    mesh = parse_mesh("tensor=1")
    assert mesh is not None
    found = shardings({"q": ParamSpec((4, 2, 8), ("heads", None, "embed"))}, mesh)
    assert found["q"].spec == PartitionSpec(("tensor",), None, None)


def test_every_rule_names_axes_of_meshes():
    assert {name for names in RULES.values() for name in names} <= set(AXES)


def test_without_a_mesh_nothing_crosses_devices():
    x = jnp.arange(6.0).reshape(2, 3)
    for fn in (sharding.sum_shards, sharding.max_shards, sharding.min_shards):
        assert fn(x, "vocab", "heads") is x
    assert sharding.gather_shards(x, "vocab", dim=0) is x
    assert sharding.scatter_sum(x, "experts", dim=0) is x
    assert sharding.shard_index("vocab") == 0
    compiled = jax.jit(lambda y: sharding.sum_shards(y, "ffn")).lower(x).compile()
    assert "all-reduce" not in (compiled.as_text() or "")
