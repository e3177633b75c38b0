"""Fused exchanges of small shapes on all devices, their inputs and the check of their results."""

import itertools

import cases
import jax
import numpy as np
import pytest
from conftest import PLATFORM
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import LogBase, Partial
from jaxcp.topology import make_mesh

DEVICES = jax.device_count()
RANKS = max(n for n in (1, 2, 4, 8) if n <= DEVICES)
needs_peers = pytest.mark.skipif(RANKS < 2, reason="needs two devices")
on_several_gpus = [pytest.mark.multigpu] * (PLATFORM == "cuda")
TWO = LogBase.TWO


def exchange_of(cp=RANKS, axis="cp", mesh=None, **changes) -> jaxcp.Exchange:
    facts = {"max_tokens": 8, "heads": 2 * cp, "head_dim": 64, "dtype": "bfloat16", "backend": "fused"} | changes
    return jaxcp.Exchange(mesh or make_mesh(cp, axis), axis, **facts)


def partials(exchange, tokens, seed=0):
    rng = np.random.default_rng([seed, tokens])
    o = rng.standard_normal((exchange.cp, tokens, exchange.heads, exchange.head_dim), np.float32)
    return o.astype(exchange.dtype), (4 * rng.standard_normal(o.shape[:-1])).astype(np.float32)


def mapped(exchange, step, **options):
    return jax.jit(
        jax.shard_map(
            step, mesh=exchange.mesh, in_specs=P(exchange.axis_name), out_specs=P(exchange.axis_name), **options
        )
    )


def merging(exchange, base=TWO):
    """o, lse of all ranks -> merged rows of all ranks, one call."""
    return mapped(exchange, lambda o, lse: exchange(Partial(o[0], lse[0], base))[None])


def assert_merged(exchange, got, o, lse, base=TWO):
    want, _, scale = cases.oracle(o, lse, base)
    h = exchange.heads_per_rank
    for rank, i in itertools.product(range(exchange.cp), range(h)):
        if (head := rank * h + i) < exchange.heads:
            cases.check_o(np.asarray(got)[rank, :, i], want[:, head], scale[:, head])


def call_numbers(exchange):
    block = exchange._engine.workspace
    return [block.library.call_number(config) for config in block.configs]


def set_call_numbers(exchange, number):
    block = exchange._engine.workspace
    for config in block.configs:
        block.library.set_call_number(config, number)
