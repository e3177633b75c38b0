"""A batch that decodes over a sharded cache on virtual devices, with what it stored kept aside for a float64 oracle."""

import dataclasses
import functools

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxcp
from jaxcp import decode, storage
from jaxcp.layout import Interleave
from jaxcp.topology import make_mesh


@dataclasses.dataclass(frozen=True)
class Case:
    """Geometry of a session; `dtype` is the queries', `cache_dtype` the cache's if it differs."""

    cp: int
    heads: int = 9
    kv_heads: int = 3
    key_dim: int = 8
    value_dim: int = 8
    latent: bool = False
    granularity: int = 1
    page_size: int = 4
    backend: str = "a2a"
    dtype: str = "float32"
    cache_dtype: str = ""
    layers: int = 2
    capacity: int = 64
    requests: int = 3

    def __str__(self) -> str:
        return ",".join(
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        )

    @property
    def config(self) -> decode.CacheConfig:
        return decode.CacheConfig(
            self.layers,
            self.kv_heads,
            self.key_dim,
            self.value_dim,
            self.latent,
            self.cache_dtype or self.dtype,
            self.page_size,
        )


class Session:
    """`case.requests` requests on ranks 0 ... cp - 1; `attention` and `prefill` store and attend like the library's."""

    def __init__(self, case: Case, seed: int = 0, **options):
        self.case, self.options, self.rng = case, options, np.random.default_rng(seed)
        self.mesh = make_mesh(case.cp)
        self.exchange = jaxcp.Exchange(
            self.mesh,
            "cp",
            max_tokens=8,
            heads=case.heads,
            head_dim=case.value_dim,
            dtype=case.dtype,
            backend=case.backend,
        )
        each = -(-case.capacity // (case.page_size * case.cp))
        ids = 1 + self.rng.permutation(case.requests * each).reshape(case.requests, each)
        self.cache = decode.init_cache(
            case.config,
            Interleave(case.cp, case.granularity),
            pages=ids.size + 1,
            requests=case.requests,
            mesh=self.mesh,
            axis_name="cp",
            page_table=ids,
        )
        self.poison()
        self.keys = [np.zeros((0, case.kv_heads, case.key_dim)) for _ in range(case.requests)]
        self.values = [np.zeros((0, case.kv_heads, case.value_dim)) for _ in range(case.requests)]
        self.scale = 0.3 if case.latent else case.key_dim**-0.5

    def poison(self):
        """NaN in every row: 0x7f is float8_e4m3fn's."""
        fill = lambda x: None if x is None else jnp.full_like(x, 0x7F if x.dtype == jnp.uint8 else jnp.nan)  # noqa: E731
        self.cache = dataclasses.replace(self.cache, k=fill(self.cache.k), v=fill(self.cache.v))

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(k) for k in self.keys])

    def truncate(self, lengths) -> None:
        """Forgets tokens, as after rejected drafts. What they stored stays in the pages."""
        self.keys = [k[:n] for k, n in zip(self.keys, lengths, strict=True)]
        self.values = [v[:n] for v, n in zip(self.values, lengths, strict=True)]

    def draw(self, *shape) -> np.ndarray:
        """Normal numbers that the queries' dtype represents."""
        return np.asarray(jnp.asarray(self.rng.standard_normal(shape), self.case.dtype), np.float64)

    def new_tokens(self, query_tokens):
        case = self.case
        padded = case.cp * self.exchange.heads_per_rank
        q = self.draw(case.requests, query_tokens, padded, case.key_dim)
        k = self.draw(case.requests, query_tokens, case.kv_heads, case.key_dim)
        v = (
            k[..., : case.value_dim]
            if case.latent
            else self.draw(case.requests, query_tokens, case.kv_heads, case.value_dim)
        )
        return q, k, v

    def as_stored(self, rows) -> np.ndarray:
        return np.asarray(storage.as_stored(jnp.asarray(rows, self.case.dtype), self.case.config.dtype), np.float64)

    def grow(self, k, v, counts) -> None:
        k, v = self.as_stored(k), self.as_stored(v)
        self.keys = [np.concatenate([old, k[b, : counts[b]]]) for b, old in enumerate(self.keys)]
        self.values = [np.concatenate([old, v[b, : counts[b]]]) for b, old in enumerate(self.values)]

    def expected(self, q, counts):
        return oracle.full(q[:, :, : self.case.heads], self.keys, self.values, counts, self.scale)

    def check_step(self, name, counts, query_tokens, **options) -> None:
        """One call of decode.`name` with new random tokens, compared with the oracle."""
        q, k, v = self.new_tokens(query_tokens)
        self.grow(k, v, counts)
        out = self.call(name, q, k, v, self.lengths, counts, **options)
        want, magnitude = self.expected(q, counts)
        oracle.assert_close(out[:, :, : self.case.heads], want, magnitude, self.case.dtype)
        assert not out[:, :, self.case.heads :].any(), "a row without a head is 0"

    def call(self, name, q, k, v, lengths, counts, layer=1, **options) -> np.ndarray:
        case = self.case
        flat = lambda x: jnp.asarray(x.reshape(-1, *x.shape[2:]), case.dtype)  # noqa: E731
        rows = (flat(k), flat(v))
        if case.latent:
            rows = (rows[0][:, 0, : case.value_dim], rows[0][:, 0, case.value_dim :])
        out, self.cache = self.step(name, counts is None, **options)(
            flat(q),
            *rows,
            self.cache,
            jnp.asarray(lengths, jnp.int32),
            None if counts is None else jnp.asarray(counts, jnp.int32),
            jnp.int32(layer),
        )
        return np.asarray(out, np.float64).reshape(*q.shape[:3], case.value_dim)

    @functools.cache  # noqa: B019  # sessions live as long as their test
    def step(self, name, no_counts=False, **options):
        """Jitted decode.`name` in shard_map, with donated cache."""
        specs, heads = self.cache.partition_specs("cp"), P(None, "cp")
        inner = functools.partial(
            getattr(decode, name), exchange=self.exchange, scale=self.scale if self.case.latent else None, **options
        )
        return jax.jit(
            jax.shard_map(
                lambda q, k, v, cache, lengths, counts, layer: inner(
                    q, k, v, cache, lengths, counts=counts, layer=layer
                ),
                mesh=self.mesh,
                in_specs=(heads, P(), P(), specs, P(), None if no_counts else P(), P()),
                out_specs=(heads, specs),
                **{"check_vma": False} | self.options,
            ),
            donate_argnums=3,
        )
