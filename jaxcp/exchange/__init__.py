"""From partials of all ranks to merged rows of my heads: `Exchange`, and `explain` for the choice."""

from jaxcp.exchange.api import Exchange
from jaxcp.exchange.resolve import BACKENDS, Resolution, explain
from jaxcp.exchange.spec import Engine, ExchangeSpec

__all__ = ["BACKENDS", "Engine", "Exchange", "ExchangeSpec", "Resolution", "explain"]
