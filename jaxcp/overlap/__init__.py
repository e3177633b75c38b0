"""Collectives that run behind computation: how to ask XLA for one, and how to see that it did."""

from jaxcp.overlap.copy_engines import sm_free
from jaxcp.overlap.gathers import SCHEDULES, all_gather, start_early
from jaxcp.overlap.hlo import Operation
from jaxcp.overlap.schedule import Collective, Report, report

__all__ = ["SCHEDULES", "Collective", "Operation", "Report", "all_gather", "report", "sm_free", "start_early"]
