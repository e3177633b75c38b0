"""Keeps the exchanges of a program in one order.

An exchange waits for its peers, so all ranks must make the same calls in the same order. XLA promises no order between
calls that do not depend on each other: XLA:CPU starts them as threads come free, differently on each device, and a
command buffer may run them as parallel branches. So every call takes a *token* from the call traced before it and gives
one to the next: a real operand, because a barrier or a side effect alone does not survive into the schedule. It is one
word that nobody reads.

A chain belongs to a trace. Inside a nested function (a scan's body, a custom_vmap rule) a new one begins; `enter`
joins it to the one outside where the token can be passed as an argument. Two nested functions whose exchanges do not
depend on each other's results stay unordered on CPU: pass something from the first into the second.
"""

import collections
import threading

import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, UInt32

NESTING = 8
"""Traces remembered per thread; the oldest goes first. More nested functions than that only lose the join."""


class _Chains(threading.local):
    """(trace, its last token), the newest first."""

    def __init__(self):
        self.entries = collections.deque(maxlen=NESTING)


_chains = _Chains()


def current() -> UInt32[Array, "1"]:
    """Token that the next call of this trace must take."""
    trace = get_opaque_trace_state(convention="flax")
    for known, token in _chains.entries:
        if known == trace:
            return token
    return jnp.zeros(1, jnp.uint32)


def enter(token: UInt32[Array, "1"]) -> None:
    """Makes `token` the one that the next call of this trace takes."""
    trace = get_opaque_trace_state(convention="flax")
    others = [entry for entry in _chains.entries if entry[0] != trace]
    _chains.entries = collections.deque([(trace, token), *others], maxlen=NESTING)
