"""Mesh axes over which values differ between ranks, as `jax.shard_map` keeps track of them (check_vma).

Results of calls that JAX cannot look into differ over every axis over which some operand does; declared by one operand
alone, shard_map would take differing results for copies of one array.
"""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array


def axes(*values: Any) -> frozenset[str]:
    """Axes over which some of `values` (arrays or their types) differs; none outside shard_map."""
    # `manual_axis_type` is public, but undocumented: jax 0.11 introduced it for what was `vma` before.
    types = [jax.typeof(x) if isinstance(x, jax.Array) else x for x in values]
    kinds = [kind for x in types if (kind := x.manual_axis_type)]
    return frozenset().union(*(kind.varying for kind in kinds))


def over(names: frozenset[str], *values: Array) -> tuple[Array, ...]:
    """`values`, marked as differing over `names` as well."""
    missing = [tuple(sorted(names - axes(x))) for x in values]
    return tuple(lax.pcast(x, new, to="varying") if new else x for x, new in zip(values, missing, strict=True))


def alike(*values: Array) -> tuple[Array, ...]:
    """`values`, each marked as differing over the axes over which some of them does."""
    return over(axes(*values), *values)
