"""For snippets of `deviceless`: QSA's arguments as shapes on one compile-only GPU, and what programs do with caches.

A snippet's process imports it:

    from deviceless_qsa import OneDevice
    one = OneDevice(mesh(cp=1))
    cache = one.cache(config, tokens, layers=12)
    with resolve.lowering_for("gpu"):
        compiled = jax.jit(stack, donate_argnums=1).lower(one.shape((rows, 24, 256), jnp.bfloat16), cache).compile()
    answer(facts(compiled, cache.k, cache.v))
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxcp import qsa
from jaxcp.qsa.segments import Segments


class OneDevice:
    """Arguments on the first device of a mesh, as shapes."""

    def __init__(self, mesh):
        self.sharding = SingleDeviceSharding(mesh.devices.flat[0])

    def shape(self, shape, dtype):
        """One array."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    def shaped(self, tree):
        """A tree of arrays or shapes."""
        return jax.tree.map(lambda a: self.shape(a.shape, a.dtype), tree)

    def cache(self, config, tokens, layers, **dtypes):
        """A cache of one request."""
        pages = tokens // 64
        sizes = {"requests": 1, "pages": 1 + pages, "layers": layers, "page_table": 1 + np.arange(pages)[None]}
        return self.shaped(jax.eval_shape(lambda: qsa.init_cache(config, **sizes, **dtypes)))

    def segments(self):
        """The rows of one request."""
        return Segments(*(self.shape((1,), jnp.int32) for _ in range(4)))


def facts(compiled, *pools):
    """Copies of arrays as large as the pools, and bytes: of the pools, of what is written in place, of temporaries."""
    memory, shapes = compiled.memory_analysis(), "|".join(re.escape(",".join(map(str, a.shape))) for a in pools)
    return {
        "copies": re.findall(rf"(?:copy|convert)[\w.\-]* = \S*\[(?:{shapes})\]", compiled.as_text()),
        "pools": sum(math.prod(a.shape) * a.dtype.itemsize for a in pools),
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }


def calls(compiled, target):
    """Custom calls of that target in a program's text."""
    return compiled.as_text().count(f'custom_call_target="{target}"')
