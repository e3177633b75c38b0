"""What no implementation can beat: operations over the rate of the unit that does them, bytes over their path's rate.

Two rates are of an H200 and stated with every figure: 790 TFLOP/s of dense bfloat16 products, and 8 TB/s at which its
SMs gather rows that lie in L2 or close to it. Reads that must come from memory are held against the measured copy rate.
"""

import numpy as np

from jaxcp.bench.qsa.cases import Case
from jaxcp.qsa import QSAConfig

PRODUCTS_PER_S = 790e12
GATHER_BYTES_PER_S = 8e12


def tokens(case: Case, config: QSAConfig) -> np.ndarray:
    """Tokens that each row attends to."""
    end = case.positions + 1
    return config.ratio * np.minimum(config.selected_blocks, end // config.ratio) + end % config.ratio


def scoring(case: Case, config: QSAConfig) -> dict[str, float]:
    """µs of the score products alone."""
    visible = ((case.positions + 1) // config.ratio).sum()
    return {"score products": _products_us(2.0 * visible * config.index_heads * config.index_dim)}


def attention(case: Case, config: QSAConfig, itemsize: int) -> dict[str, float]:
    """µs of gathering every row's K and V once for each row, and of the products over the selected tokens."""
    selected = float(tokens(case, config).sum())
    return {
        "gather per row": selected * 2 * config.kv_heads * config.head_dim * itemsize / GATHER_BYTES_PER_S * 1e6,
        "products": _products_us(4 * selected * config.heads * config.head_dim),
    }


def dense(case: Case, config: QSAConfig) -> dict[str, float]:
    """µs of the products of dense causal attention."""
    return {"dense products": _products_us(4.0 * (case.positions + 1).sum() * config.heads * config.head_dim)}


def projections(rows: int, config: QSAConfig) -> dict[str, float]:
    """µs of the input and output products of so many rows."""
    c = config
    features = c.heads * 3 * c.head_dim + 2 * c.kv_heads * c.head_dim + (c.index_heads + 1) * c.index_dim
    return {"products": _products_us(2.0 * rows * c.hidden * features)}


def reads(case: Case, config: QSAConfig, itemsize: int, bytes_per_s: float) -> dict[str, float]:
    """µs of reading the compressed keys of every request once, the selected K and V of every row, and both."""
    keys = case.requests * (case.keys // config.ratio) * config.index_dim * itemsize
    selected = float(tokens(case, config).sum()) * 2 * config.kv_heads * config.head_dim * itemsize
    return {
        "select": keys / bytes_per_s * 1e6,
        "attend": selected / bytes_per_s * 1e6,
        "mixer": (keys + selected) / bytes_per_s * 1e6,
    }


def _products_us(operations: float) -> float:
    return operations / PRODUCTS_PER_S * 1e6
