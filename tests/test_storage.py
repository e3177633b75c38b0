"""Values as a cache stores them: on the host, and in programs for GPUs."""

import deviceless
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcp import storage


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
@pytest.mark.parametrize("jitted", [False, True])
def test_as_stored(dtype, jitted):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 30)) * 10, jnp.float32)
    x = x.at[0, :4].set(jnp.array([1e4, -1e4, jnp.nan, 1.0625]))  # beyond the largest, and between two of float8
    back = lambda x: storage.as_stored(x, jnp.dtype(dtype)).astype(x.dtype)  # noqa: E731
    got = (jax.jit(back) if jitted else back)(x)
    limit = storage.E4M3_MAX if dtype == "float8_e4m3fn" else np.inf
    np.testing.assert_array_equal(got, np.clip(x, -limit, limit).astype(dtype).astype(np.float32))


@deviceless.requires_plugin
def test_gpus_round_what_is_widened_again(tmp_path):
    """XLA:GPU would take the two conversions for none."""
    texts = deviceless.run(
        """
        from jaxcp import storage
        on_one = jax.sharding.SingleDeviceSharding(mesh(x=1).devices.item())

        def text(dtype, x_dtype):
            x = jax.ShapeDtypeStruct((64, 128), x_dtype, sharding=on_one)
            back = lambda x: 2 * storage.as_stored(x, jnp.dtype(dtype)).astype(x.dtype)
            return jax.jit(back).lower(x).compile().as_text()

        answer({"f8e4m3fn": text("float8_e4m3fn", "bfloat16"), "bf16": text("bfloat16", "float32")})
        """,
        tmp_path,
    )
    for narrow, text in texts.items():
        assert f"{narrow}[64,128]{{1,0}} convert(" in text
