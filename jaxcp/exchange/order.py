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

import threading
import weakref

import jax.numpy as jnp
from jax import lax
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, UInt32


class _Chains(threading.local):
    """(trace, weak reference to its last token) of the traces that are alive."""

    def __init__(self):
        self.entries = []


_chains = _Chains()


def current() -> UInt32[Array, "1"]:
    """Token that the next call of this trace must take."""
    trace = get_opaque_trace_state(convention="flax")
    for known, reference in _chains.entries:
        if known == trace and (token := reference()) is not None:
            return token
    return jnp.zeros(1, jnp.uint32)


def enter(token: UInt32[Array, "1"]) -> None:
    """Makes `token` the one that the next call of this trace takes."""
    # An operation on the token, dead code to XLA, keeps it alive as long as its trace and no longer: holding it here
    # would keep the trace, the program's closures and the exchange itself alive for ever.
    lax.bitwise_not(token)
    trace = get_opaque_trace_state(convention="flax")
    others = [(known, reference) for known, reference in _chains.entries if known != trace and reference() is not None]
    _chains.entries = [(trace, weakref.ref(token)), *others]
