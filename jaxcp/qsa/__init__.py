"""Qwen sparse attention (QSA): an indexer scores blocks of tokens, each query row attends to the best of them.

plan = qsa.plan(lengths, prefix_lengths, cache=cache)      # host integers -> one small device array, static buckets
y, cache = qsa.prefill(params, plan.pad(x), cache, plan)   # writes the chunk, attends; the cache is donated
y, cache = qsa.prefill_layers(params, x, cache, plan)      # a stack of layers, params stacked
y, cache = qsa.decode(params, x, cache, lengths)           # k >= 1 tokens of every request

Context parallelism: qsa.plan(..., cp=8), and prefill inside jax.shard_map with axis_name="cp", on plan.shard(x).
"""

from jaxcp.qsa.balance import Cost
from jaxcp.qsa.cache import Cache, check, init_cache
from jaxcp.qsa.checkpoint import load_params
from jaxcp.qsa.config import QSAConfig
from jaxcp.qsa.decode import decode
from jaxcp.qsa.forward import traces
from jaxcp.qsa.layers import prefill_layers
from jaxcp.qsa.params import IndexerParams, Params, from_tensors, init_params
from jaxcp.qsa.plan import Plan, plan
from jaxcp.qsa.prefill import prefill
from jaxcp.qsa.snapshot import Snapshot, restore, save

__all__ = [
    "Cache",
    "Cost",
    "IndexerParams",
    "Params",
    "Plan",
    "QSAConfig",
    "Snapshot",
    "check",
    "decode",
    "from_tensors",
    "init_cache",
    "init_params",
    "load_params",
    "plan",
    "prefill",
    "prefill_layers",
    "restore",
    "save",
    "traces",
]
