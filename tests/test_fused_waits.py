"""The fused exchange's bounded waits: ranks that do not come, come late, or call once more.

Machines that run tests stall, so whatever must succeed has seconds: the first call of a program, which waits ten times
`timeout_s`, or a longer `timeout_s`.
"""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_calls import (
    TWO,
    assert_merged,
    exchange_of,
    mapped,
    merging,
    needs_peers,
    on_several_gpus,
    partials,
)
from jax import lax

from jaxcp import Partial
from jaxcp.errors import PeerTimeoutError
from jaxcp.exchange import watcher, workspace

pytestmark = [*on_several_gpus, pytest.mark.xdist_group("fused_waits")]


def skipping(exchange, absent):
    """A program in which rank `absent` does not call the exchange."""

    def step(o, lse):
        missing = jnp.zeros((o.shape[1], exchange.heads_per_rank, exchange.head_dim), o.dtype)
        return lax.cond(lax.axis_index("cp") == absent, lambda: missing, lambda: exchange(Partial(o[0], lse[0], TWO)))[
            None
        ]

    return mapped(exchange, step, check_vma=False)


@needs_peers
def test_a_rank_that_never_comes(monkeypatch):
    monkeypatch.setattr(workspace, "FIRST_CALL_FACTOR", 1)
    exchange = exchange_of(timeout_s=3.0)
    absent = exchange.cp - 1
    merge, inputs = merging(exchange), partials(exchange, 3)
    skip = skipping(exchange, absent).lower(*inputs).compile()
    merge(*inputs).block_until_ready()
    exchange.check()

    out = np.asarray(skip(*inputs)).astype(np.float32)
    assert np.isnan(out[:absent]).all()
    assert (out[absent] == 0).all()
    with pytest.raises(
        PeerTimeoutError,
        match=rf"rank \d waited longer than 3 s \(3 s in the first run of a call\) for rank {absent} in call 1 \(row",
    ):
        exchange.check()
    with pytest.raises(PeerTimeoutError):  # tracing
        merging(exchange)(*inputs)
    start = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError, match="PeerTimeoutError"):  # a program compiled before
        merge(*inputs).block_until_ready()
    assert time.monotonic() - start < 3.0  # at once: it waits for nobody

    exchange.reset()
    exchange.check()
    for step in range(3):
        o, lse = partials(exchange, 3, seed=step)
        assert_merged(exchange, merge(o, lse), o, lse)
    exchange.check()


def sleeping(exchange, late, seconds):
    """A program in which rank `late` sleeps before its exchange."""

    def wait(x):
        time.sleep(seconds)
        return x

    def step(o, lse):
        lse = lax.cond(lax.axis_index("cp") == late, lambda: jax.pure_callback(wait, lse, lse), lambda: lse)
        return exchange(Partial(o[0], lse[0], TWO))[None]

    return mapped(exchange, step, check_vma=False)


@needs_peers
def test_a_rank_that_comes_late_but_in_time():
    exchange = exchange_of(timeout_s=20.0)
    o, lse = partials(exchange, 3)
    assert_merged(exchange, sleeping(exchange, 0, 0.3)(o, lse), o, lse)
    exchange.check()


@needs_peers
def test_a_rank_that_comes_too_late():
    exchange = exchange_of(timeout_s=0.5)
    o, lse = partials(exchange, 3)
    late = sleeping(exchange, 1, 2.0).lower(o, lse).compile()
    late_once = late(o, lse)  # the first call of a site waits ten times as long
    assert_merged(exchange, late_once, o, lse)
    out = np.asarray(late(o, lse)).astype(np.float32)
    assert np.isnan(out[0]).all()
    with pytest.raises(PeerTimeoutError, match="for rank 1"):
        exchange.check()
    exchange.reset()
    assert_merged(exchange, merging(exchange)(o, lse), o, lse)


@needs_peers
def test_a_rank_that_calls_once_more():
    exchange = exchange_of(timeout_s=0.3)
    o, lse = partials(exchange, 3)

    def step(o, lse):
        merged = exchange(Partial(o[0], lse[0], TWO))
        more = lax.cond(lax.axis_index("cp") == 0, lambda: exchange(Partial(o[0], lse[0], TWO)), lambda: merged)
        return merged[None], more[None]

    merged, more = mapped(exchange, step, check_vma=False)(o, lse)
    assert_merged(exchange, merged, o, lse)
    assert np.isnan(np.asarray(more)[0].astype(np.float32)).all()
    with pytest.raises(PeerTimeoutError, match="rank 0 waited"):
        exchange.check()
    exchange.reset()
    assert_merged(exchange, merging(exchange)(o, lse), o, lse)


@needs_peers
def test_an_expired_wait_is_logged_once_while_nobody_asks(caplog):
    exchange = exchange_of(timeout_s=0.1)
    skipping(exchange, 0)(*partials(exchange, 1)).block_until_ready()
    deadline = time.monotonic() + 30
    while "PeerTimeoutError" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(3 * watcher.PERIOD_S)
    assert caplog.text.count("PeerTimeoutError") == 1
    assert re.search(r"rank \d waited .* for rank 0 in call 0", caplog.text)


@needs_peers
def test_skew():
    """Ranks that are late by up to a millisecond, each at other calls."""
    exchange = exchange_of(timeout_s=20.0)

    def wait(microseconds):
        time.sleep(float(microseconds) * 1e-6)
        return np.uint32(0)

    def step(o, lse, delays):
        def layer(carry, delay):
            late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.uint32), delay)
            merged = exchange(Partial(o[0] + (carry + late).astype(o.dtype), lse[0], TWO))
            return merged[0, 0, 0].astype(jnp.uint32) * 0, merged

        return lax.scan(layer, jnp.uint32(0), delays[0])[1][None]

    o, lse = partials(exchange, 2)
    delays = np.random.default_rng(0).integers(1, 1000, (exchange.cp, 50)).astype(np.int32)
    merged = np.asarray(mapped(exchange, step, check_vma=False)(o, lse, delays))
    assert_merged(exchange, merged[:, 0], o, lse)
    assert (merged.view(np.uint16) == merged[:, :1].view(np.uint16)).all()
    exchange.check()
