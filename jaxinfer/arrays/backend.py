"""What a step is traced for, where one form runs better on one backend and another on the next."""

from __future__ import annotations

import jax


def backend() -> str:
    """Returns the backend that is traced for: ``cpu``, ``gpu`` or ``tpu``.

    It is the platform of the mesh in use (`jax.sharding.use_abstract_mesh`), so that a machine without a device can
    compile for one, and the process's default where no mesh is in use. jit traces anew for another mesh.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
