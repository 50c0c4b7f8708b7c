"""What a step is traced for."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.arrays.backend import backend


def test_backend_is_that_of_the_mesh_in_use_and_no_trace_is_taken_for_anothers():
    step = jax.jit(lambda x: x + {"cpu": 1, "tpu": 2}[backend()])
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    assert backend() == "cpu"
    assert step(jnp.float32(0)) == 1
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert backend() == "tpu"
        assert "2.0" in step.lower(jax.ShapeDtypeStruct((), jnp.float32)).as_text()
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",))):
        assert backend() == "cpu"
