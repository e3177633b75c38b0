"""A llama forward in float64 on the host, over whole sequences: no cache, no mesh, no jax; slow and obvious."""

import numpy as np


def logits(weights, config, tokens):
    """float64 [len(tokens), vocabulary]: logits after each token of one sequence."""
    x = weights["embedding"][np.asarray(tokens)].astype(np.float64)
    for i in range(config.layers):
        w = {name: block[i].astype(np.float64) for name, block in weights["blocks"].items()}
        n = _norm(x, w["attention_norm"], config.epsilon)
        x = x + _attention(n, w, config) @ w["output"].T
        n = _norm(x, w["ffn_norm"], config.epsilon)
        gate = n @ w["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w["up"].T)) @ w["down"].T
    return _norm(x, weights["norm"], config.epsilon) @ weights["embedding"].T.astype(np.float64)


def greedy(weights, config, prompt, count):
    """The `count` greedy tokens after `prompt`, and the gaps between the best two logits."""
    tokens, gaps = list(prompt), []
    for _ in range(count):
        last = logits(weights, config, tokens)[-1]
        second, first = np.sort(last)[-2:]
        tokens.append(int(np.argmax(last)))
        gaps.append(float(first - second))
    return tokens[len(prompt) :], gaps


def _norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def _rope(x, base):
    """[tokens, heads, dim]: each adjacent pair as a complex number, turned by position * base^(-2i / dim)."""
    tokens, _, dim = x.shape
    angle = np.arange(tokens)[:, None, None] * base ** (-np.arange(0, dim, 2) / dim)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def _attention(n, w, config):
    tokens = len(n)
    q, k, v = ((n @ w[name].T).reshape(tokens, -1, config.head_dim) for name in ("query", "key", "value"))
    q, k = _rope(q, config.rope_base), _rope(k, config.rope_base)
    out = np.empty_like(q)
    for head in range(config.heads):
        shared = head * config.kv_heads // config.heads
        scores = q[:, head] @ k[:, shared].T / np.sqrt(config.head_dim)
        scores[np.triu_indices(tokens, 1)] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = p / p.sum(axis=-1, keepdims=True) @ v[:, shared]
    return out.reshape(tokens, -1)
