"""The MLA layer: absorbed over a sharded cache equals the expanded form, for every number of ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import decode
from jaxcp.layout import Interleave
from jaxcp.models import mla
from jaxcp.topology import make_mesh

SMALL = mla.MLAConfig(width=24, heads=5, nope_dim=6, rope_dim=4, value_dim=7, latent_dim=10, ffn=20)


class Layer:
    """One layer on `cp` ranks with a cache of two requests; calls store and attend."""

    def __init__(self, config, weights, cp, *, dtype, capacity=48, page_size=4, backend="a2a"):
        self.config, self.dtype, self.mesh = config, dtype, make_mesh(cp)
        self.exchange = jaxcp.Exchange(
            self.mesh, "cp", max_tokens=16, heads=config.heads, head_dim=config.latent_dim, dtype=dtype, backend=backend
        )
        pages = 1 + 2 * -(-capacity // (page_size * cp))
        self.cache = decode.init_cache(
            config.cache(2, dtype, page_size), Interleave(cp), pages=pages, requests=2, mesh=self.mesh, axis_name="cp"
        )
        self.weights = mla.padded(weights, cp)

    @functools.cache  # noqa: B019
    def step(self, prefill):
        specs = self.cache.partition_specs("cp")
        call = functools.partial(mla.layer, config=self.config, exchange=self.exchange, prefill=prefill)
        return jax.jit(
            jax.shard_map(
                lambda w, x, cache, lengths, counts: call(w, x, cache, lengths, index=1, counts=counts),
                mesh=self.mesh,
                in_specs=(mla.partition_specs(self.config, "cp"), P(), specs, P(), P()),
                out_specs=(P(), specs),
                check_vma=False,
            ),
            donate_argnums=2,
        )

    def __call__(self, x, lengths, counts, prefill=False):
        """x [requests, query_tokens, width] -> the same shape."""
        y, self.cache = self.step(prefill)(
            self.weights,
            jnp.asarray(x.reshape(-1, x.shape[2]), self.dtype),
            self.cache,
            jnp.asarray(lengths, jnp.int32),
            jnp.asarray(counts, jnp.int32),
        )
        return np.asarray(y, np.float64).reshape(x.shape)


def feed(layer, prompts):
    """Both prompts: all but the last 5 tokens by prefill, then 3 tokens and twice 1 by decode, padded to 3."""
    lengths = [len(x) for x in prompts]
    ragged = max(lengths) - 5
    batch = np.zeros((2, ragged, prompts[0].shape[1]))
    for b, x in enumerate(prompts):
        batch[b, : len(x) - 5] = x[:-5]
    counts = np.array(lengths) - 5
    pieces = [[y[: counts[b]] for b, y in enumerate(layer(batch, counts, counts, prefill=True))]]
    for start, stop in ((-5, -2), (-2, -1), (-1, None)):
        x = np.stack([prompt[start:stop] for prompt in prompts])
        new = x.shape[1]
        counts = counts + new
        pieces.append(list(layer(np.pad(x, ((0, 0), (0, 3 - new), (0, 0))), counts, [new] * 2)[:, :new]))
    decode.check(layer.cache)
    return [np.concatenate(request) for request in zip(*pieces, strict=True)]


@pytest.fixture(scope="module")
def small():
    """(weights, prompts, the expanded form's outputs) in float64."""
    with jax.enable_x64(True):
        weights = mla.random_weights(SMALL, jax.random.key(0), "float64")
        rng = np.random.default_rng(0)
        prompts = [rng.standard_normal((n, SMALL.width)) for n in (33, 8)]
        expanded = jax.jit(functools.partial(mla.expanded, config=SMALL))
        return weights, prompts, [np.asarray(expanded(weights, jnp.asarray(x))) for x in prompts]


@pytest.mark.parametrize(("cp", "backend"), [(1, "a2a"), (2, "ag_rs"), (3, "allgather"), (8, "ag_rs")])
def test_absorbed_equals_expanded_in_float64(small, cp, backend):
    weights, prompts, expected = small
    with jax.enable_x64(True):
        got = feed(Layer(SMALL, weights, cp, dtype="float64", backend=backend), prompts)
    for y, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-9, atol=1e-11)


def test_ranks_change_nothing_but_the_order_of_sums_in_float32(small):
    weights, prompts, _ = small
    weights = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}
    one, many = (feed(Layer(SMALL, weights, cp, dtype="float32"), prompts) for cp in (1, 8))
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_expanded_attention_is_what_the_paper_says(small):
    """One head and token at a time, from the layer's weights, up to the attention output."""
    weights, prompts, expected = small
    w, x, eps = {n: np.asarray(a) for n, a in weights.items()}, prompts[1], SMALL.epsilon
    norm = lambda x, s: x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * s  # noqa: E731

    def turn(x, position):
        z = x[0::2] + 1j * x[1::2]
        angle = position * np.float32(SMALL.rope_base ** (-np.arange(0, SMALL.rope_dim, 2) / SMALL.rope_dim))
        z = z * np.exp(1j * angle.astype(np.float64))
        return np.stack([z.real, z.imag], -1).ravel()

    n = norm(x, w["attention_norm"])
    rows = n @ w["compress"]
    latent = norm(rows[:, : SMALL.latent_dim], w["latent_norm"])
    ropes = [turn(row[SMALL.latent_dim :], p) for p, row in enumerate(rows)]
    h = x.copy()
    for t in range(len(x)):
        for j in range(SMALL.heads):
            q = n[t] @ w["query"][j]
            q = np.concatenate([q[: SMALL.nope_dim], turn(q[SMALL.nope_dim :], t)])
            k = np.stack([np.concatenate([latent[p] @ w["up_key"][j], ropes[p]]) for p in range(t + 1)])
            s = k @ q / np.sqrt(SMALL.nope_dim + SMALL.rope_dim)
            p = np.exp(s - s.max())
            h[t] += p / p.sum() @ (latent[: t + 1] @ w["up_value"][j]) @ w["output"][j]
    n = norm(h, w["ffn_norm"])
    gate = n @ w["gate"]
    y = h + (gate / (1 + np.exp(-gate)) * (n @ w["up"])) @ w["down"]
    # rope's angles are float32
    np.testing.assert_allclose(expected[1], y, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_deepseek_v2_lite_geometry():
    """The full layer on 8 ranks, in float64 and in bfloat16."""
    config = mla.MLAConfig.deepseek_v2_lite()
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)  # XLA's normal numbers, not optimised, take 12 s more
        weights = {
            name: jnp.asarray(rng.standard_normal(shape) * shape[-2] ** -0.5 if len(shape) > 1 else np.ones(shape))
            for name, shape in config.shapes().items()
        }
        expanded = jax.jit(functools.partial(mla.expanded, config=config))
        prompts = [rng.standard_normal((n, config.width)) for n in (11, 7)]
        expected = [np.asarray(expanded(weights, jnp.asarray(x))) for x in prompts]
        got = feed(Layer(config, weights, 8, dtype="float64", backend="ag_rs"), prompts)
        for y, want in zip(got, expected, strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-8, atol=1e-9)
    weights = {name: jnp.asarray(w, jnp.bfloat16) for name, w in weights.items()}
    got = feed(Layer(config, weights, 8, dtype="bfloat16"), prompts)
    for y, want in zip(got, expected, strict=True):
        # A dozen roundings to bfloat16 between x and y, each 2^-9 of numbers about as large as y.
        assert np.sqrt(np.mean((y - want) ** 2)) < 12 * 2**-9 * np.sqrt(np.mean(want**2))


def test_padding_adds_nothing(small):
    weights, _, _ = small
    padded = mla.padded(weights, 8)
    assert padded["query"].shape == (8, 24, 10)
    assert padded["down"].shape == (24, 24)
    assert not np.asarray(padded["output"][5:]).any()
    assert jax.tree.structure(mla.partition_specs(SMALL, "cp")) == jax.tree.structure(padded)
