"""Greedy generation: prompts in, tokens out as they are produced."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxcp import decode
from jaxcp.models.decoder import Decoder, Emitted


@dataclasses.dataclass(frozen=True)
class Token:
    """A generated token.

    Attributes:
      request: index of its prompt.
      id: in the vocabulary.
      gap: by how much its logit leads the second best; a small one may fall either way with other rounding.
    """

    request: int
    id: int
    gap: float


@dataclasses.dataclass(frozen=True)
class Generation:
    """All that was generated.

    Attributes:
      tokens: ids per prompt, the end token included where it came.
      gaps: per token, see `Token.gap`.
      steps: decode steps run.
      seconds: spent in them, without prefill and compilation.
      kv_bytes_per_rank: keys and values kept by one rank.
    """

    tokens: list[list[int]]
    gaps: list[list[float]]
    steps: int
    seconds: float
    kv_bytes_per_rank: int

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token of one request."""
        return 1e3 * self.seconds / max(len(tokens) for tokens in self.tokens)


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    end: int | None = None,
    on_token: Callable[[Token], None] = lambda token: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Generation:
    """Greedy continuation of `prompts`.

    Args:
      decoder: of a runtime for this many prompts.
      prompts: token ids, one list per request.
      max_new: tokens to generate for each.
      end: id after which a request is over; None goes on to `max_new`.
      on_token: called with each token as soon as it is known.
      progress: called with (tokens done, tokens in all) while the prompts are read.

    Raises:
      ValueError: see `Runtime.state`.
      JaxcpError: a device reported a failure.
    """
    state = decoder.runtime.state(prompts, max_new, decoder.speculate)
    kv_bytes = state.cache.bytes_per_rank
    decoder.compile(state)
    state = decoder.runtime.prefill(state, max(map(len, prompts)), progress)

    output = _Output(len(prompts), max_new, end, on_token)
    start = time.perf_counter()
    state, emitted = decoder(state)
    for _ in range(max_new - 1):  # each step grows every open request by one token at least
        state, following = decoder(state)
        if output.take(_read(emitted, decoder)):  # while the next step runs
            break
        emitted = following
    else:
        output.take(_read(emitted, decoder))
    seconds = time.perf_counter() - start
    decode.check(state.cache)
    return Generation(output.tokens, output.gaps, output.steps, seconds, kv_bytes)


def _read(emitted: Emitted, decoder: Decoder) -> Emitted:
    """One step's results on the host. A failed exchange fills them with NaN's tokens, so it is asked first."""
    tokens, counts, gaps = (np.asarray(x) for x in (emitted.tokens, emitted.counts, emitted.gaps))
    decoder.exchange.check()
    return Emitted(tokens, counts, gaps)


class _Output:
    """Collects what steps emit until every request is over."""

    def __init__(self, requests: int, max_new: int, end: int | None, on_token: Callable[[Token], None]):
        self.tokens: list[list[int]] = [[] for _ in range(requests)]
        self.gaps: list[list[float]] = [[] for _ in range(requests)]
        self.steps = 0
        self._open = set(range(requests))
        self._max_new, self._end, self._on_token = max_new, end, on_token

    def take(self, emitted: Emitted) -> bool:
        """Takes one step's tokens; True once every request is over."""
        self.steps += 1
        for request in sorted(self._open):
            tokens = emitted.tokens[request, : emitted.counts[request]]
            for token, gap in zip(tokens, emitted.gaps[request], strict=False):
                self._append(Token(request, int(token), float(gap)))
                if request not in self._open:
                    break
        return not self._open

    def _append(self, token: Token) -> None:
        tokens = self.tokens[token.request]
        tokens.append(token.id)
        self.gaps[token.request].append(token.gap)
        self._on_token(token)
        if token.id == self._end or len(tokens) == self._max_new:
            self._open.remove(token.request)
