"""Drafting by prompt look-up: text repeats itself, so what followed the last few tokens before may follow again.

No draft model. The drafted tokens are verified together with the next token in one step of several query rows, and
only those that greedy decoding would have produced are kept: the text is that of plain greedy, in fewer steps.
Source: Saxena, "Prompt Lookup Decoding" (2023).
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxcp.errors import invalid

LONGEST_MATCH = 3
"""Tokens compared before a position; the longest match wins, then the latest."""


def check_speculate(speculate: object) -> None:
    """Raises ValueError unless `speculate` is a number of tokens to draft, 0 for none."""
    if isinstance(speculate, bool) or not isinstance(speculate, int) or speculate < 0:
        raise invalid("speculate", repr(speculate), "an integer >= 0", "It counts drafted tokens per step.")


def draft(tokens: Int[Array, " capacity"], length: Int[Array, ""], count: int) -> Int[Array, " count"]:
    """The `count` tokens after the best earlier occurrence of the text's end, as if the text went on repeating itself.

    Args:
      tokens: [capacity] ids, of which the first `length` are known.
      length: tokens known, >= 1.
      count: tokens to draft. Without an earlier occurrence they are arbitrary, and will be rejected.
    """
    capacity = tokens.shape[0]
    position = jnp.arange(capacity)
    run = jnp.zeros(capacity, jnp.int32)  # tokens before and at each position that equal the text's end
    unbroken = position < length - 1
    for back in range(LONGEST_MATCH):
        last = tokens[jnp.maximum(length - 1 - back, 0)]
        unbroken &= (jnp.roll(tokens, back) == last) & (position >= back)
        run += unbroken
    best = jnp.argmax(run * capacity + position * (run > 0))
    period = jnp.maximum(length - 1 - best, 1)
    return tokens[best + 1 + jnp.arange(count) % period]


def accepted(best: Int[Array, "requests rows"], query: Int[Array, "requests rows"]) -> Int[Array, " requests"]:
    """How many of `best` are greedy's: the one after the known token, and one more for each draft that was right.

    Row t of `best` follows query token t, so it counts while query tokens 1 ... t were what greedy wanted.
    """
    right = best[:, :-1] == query[:, 1:]
    return 1 + jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
