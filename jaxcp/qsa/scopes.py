"""Names of a layer's parts: what profiles and compiled programs list their operations under (`jax.named_scope`)."""

PROJECTIONS = "qsa_projections"
INDEXER = "qsa_indexer"
ATTENTION = "qsa_attention"
GATHERS = "qsa_gathers"
"""What stands in a gather's place; collectives are known by what they are."""
