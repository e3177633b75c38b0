"""Collectives that run behind computation: how to ask XLA for one, and how to see that it did."""

from jaxcp.overlap.gathers import SCHEDULES, all_gather, start_early

__all__ = ["SCHEDULES", "all_gather", "start_early"]
