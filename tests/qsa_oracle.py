"""One QSA layer in float64 numpy, written from its equations: whole requests, a row at a time, no cache, no tricks."""

import dataclasses

import numpy as np

from jaxcp import qsa

TINY = qsa.QSAConfig(
    hidden=16, heads=4, kv_heads=2, head_dim=8, rotary_dim=4, rope_theta=100.0, mrope_section=(1, 1, 0),
    index_heads=2, index_dim=6, budget=16, ratio=4,
)  # fmt: skip
"""Selects 4 blocks of 4: rows of up to 19 tokens."""

BUDGET = dataclasses.replace(TINY, hidden=8, heads=2, kv_heads=1, budget=2048)
"""The model's budget and ratio on small heads: rows of up to 2051 tokens."""


@dataclasses.dataclass
class Answer:
    """What the layer gives for one request.

    y: [tokens, hidden]. blocks: selected block ids of each row. rows: token ids of each row.
    keys: [blocks, index_dim], compressed. scores: of each row's visible blocks.
    """

    y: np.ndarray
    blocks: list
    rows: list
    keys: np.ndarray
    scores: list


def layer(c: qsa.QSAConfig, w: dict, x, rope=None) -> Answer:
    """The whole layer over one request; `rope` [3, tokens], or None for text."""
    w, x = {name: np.asarray(a, np.float64) for name, a in w.items()}, np.asarray(x, np.float64)
    n = len(x)
    rope = np.stack([np.arange(n)] * 3) if rope is None else np.asarray(rope)
    qg = (x @ w["q_proj.weight"].T).reshape(n, c.heads, 2, c.head_dim)
    q = rotate(c, norm(c, qg[:, :, 0], w["q_norm.weight"]), rope)
    k = rotate(c, norm(c, (x @ w["k_proj.weight"].T).reshape(n, c.kv_heads, c.head_dim), w["k_norm.weight"]), rope)
    v = (x @ w["v_proj.weight"].T).reshape(n, c.kv_heads, c.head_dim)
    index = (x @ w["indexer.index_qk_proj.weight"].T).reshape(n, c.index_heads + 1, c.index_dim)
    index_q = rotate(c, norm(c, index[:, :-1], w["indexer.q_layernorm.weight"]), rope)
    whole = n // c.ratio
    pooled = index[: whole * c.ratio, -1].reshape(whole, c.ratio, c.index_dim).mean(1)
    keys = rotate(c, norm(c, pooled, w["indexer.k_layernorm.weight"])[:, None], rope[:, : whole * c.ratio : c.ratio])[
        :, 0
    ]
    y, blocks, rows, scores = [], [], [], []
    for p in range(n):
        visible = (p + 1) // c.ratio
        scores.append(np.maximum(index_q[p] @ keys[:visible].T, 0).sum(0) / np.sqrt(c.index_dim))
        blocks.append(largest(scores[-1], c.budget // c.ratio))
        rows.append(tokens(blocks[-1], p, c.ratio))
        o = attend(q[p], k[rows[-1]], v[rows[-1]])
        y.append((o / (1 + np.exp(-qg[p, :, 1]))).ravel() @ w["o_proj.weight"].T)
    return Answer(np.array(y).reshape(n, c.hidden), blocks, rows, keys, scores)


def norm(c, x, w):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.eps) * (1 + w)


def rotate(c, x, rope):
    """x [tokens, heads, dim], rope [3, tokens]: pairs (i, i + R/2) turned as complex numbers."""
    half = c.rotary_dim // 2
    z = x[..., :half] + 1j * x[..., half : 2 * half]
    for i in range(half):
        axis = next((a for a in (1, 2) if i % 3 == a and i < 3 * c.mrope_section[a]), 0)
        z[..., i] *= np.exp(1j * rope[axis] * c.rope_theta ** (-2 * i / c.rotary_dim))[:, None]
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)


def largest(score, k):
    """Ids of the k largest scores, ascending; of equal ones the smaller ids."""
    return np.sort(np.argsort(-score, kind="stable")[:k])


def tokens(blocks, p, ratio):
    """Token ids of a row: its blocks, then the incomplete block up to p."""
    inside = (np.asarray(blocks, int)[:, None] * ratio + np.arange(ratio)).ravel()
    return np.concatenate([inside, np.arange((p + 1) // ratio * ratio, p + 1)])


def attention(q, k, v):
    """(o [heads, dim], lse [heads] in base 2, probabilities [kv_heads, group, tokens]) of a row; softmax is in base 2.

    q [heads, dim], scaled by scale log2(e), over one or more k, v [tokens, kv_heads, dim].
    """
    logits = q.reshape(k.shape[1], -1, q.shape[-1]) @ k.transpose(1, 2, 0)
    top = logits.max(-1, keepdims=True)
    p = np.exp2(logits - top)
    total = p.sum(-1, keepdims=True)
    p /= total
    return (p @ v.transpose(1, 0, 2)).reshape(q.shape), (top + np.log2(total)).ravel(), p


def attend(q, k, v):
    """q [heads, dim] over k, v [tokens, kv_heads, dim]; 0 without tokens."""
    if not len(k):
        return np.zeros((len(q), v.shape[-1]))
    return attention(q * (np.log2(np.e) / np.sqrt(q.shape[-1])), k, v)[0]


def weights(c: qsa.QSAConfig, seed=0) -> dict:
    """Random weights by checkpoint name, float32 values."""
    rng = np.random.default_rng(seed)
    from jaxcp.qsa.params import shapes

    return {
        name: (rng.normal(size=s) * (s[-1] ** -0.5 if len(s) == 2 else 0.2)).astype(np.float32)
        for name, s in shapes(c).items()
    }


def hidden(c: qsa.QSAConfig, n, seed=0) -> np.ndarray:
    """Random token rows [n, hidden], float32 values."""
    return np.random.default_rng([seed, 99]).normal(size=(n, c.hidden)).astype(np.float32)


def image_positions(n, seed=0) -> np.ndarray:
    """[3, n]: text, a 3-wide image whose tokens share one temporal position, text again."""
    head, wide = n // 3, n // 4
    t = np.concatenate([np.arange(head), np.full(wide, head), np.arange(n - head - wide) + head + wide])
    h, w = t.copy(), t.copy()
    h[head : head + wide] += np.arange(wide) // 3
    w[head : head + wide] += np.arange(wide) % 3
    return np.stack([t, h, w])
