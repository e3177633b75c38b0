"""Which rank owns which token.

`Interleave` is decode's layout: within each request, `granularity` consecutive tokens go to a rank before the next rank
takes over. `Zigzag` and `PackedInterleave` are prefill's: they deal out the new tokens of a packed batch.

Every formula accepts host integers (int or numpy, checked, numpy int32 out) and traced or device arrays (unchecked,
int32 out); both run the same code.
"""

from jaxcp.layout.integers import INT32_MAX, Ints, positive_int
from jaxcp.layout.interleave import Interleave
from jaxcp.layout.packed import PackedInterleave, Runs, Split, Zigzag

__all__ = ["INT32_MAX", "Interleave", "Ints", "PackedInterleave", "Runs", "Split", "Zigzag", "positive_int"]
