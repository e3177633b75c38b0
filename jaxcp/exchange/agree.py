"""Steps that all processes take together: one failure is everybody's failure, and nobody is left waiting.

Uses jax's public multihost call only: it meets all processes of the job, not those of a mesh, and it has no bound. With
one process nothing is sent.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxcp.errors import BackendError


def together(step: str, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` in every process of the job and returns what each got, in process order.

    Args:
      step: what it does, for messages.
      work: returns something that json can carry.

    Raises:
      BackendError: `work` raised in some process; the same error in every process, naming the first.
    """
    try:
        mine, failure = {"result": work()}, None
    except Exception as error:  # whatever went wrong here must reach every process, else they wait for this one
        mine, failure = {"error": f"{type(error).__name__}: {error}"}, error
    everyone = allgather(mine)
    for process, answer in enumerate(everyone):
        if "error" in answer:
            raise BackendError(
                f"exchange: {step} failed in process {process}: {answer['error']}. All processes give "
                "up together; "
                "use backend='a2a' if this machine cannot share memory between ranks."
            ) from failure
    return [answer["result"] for answer in everyone]


def allgather(value: Any) -> list[Any]:
    """`value` of every process, in process order; a public collective over all processes of the job."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.asarray(data.size, np.int32))).reshape(-1)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(bytes(row[:size]).decode()) for row, size in zip(rows, sizes, strict=True)]


def the_same(what: str, values: list[dict[str, Any]]) -> dict[str, Any]:
    """The one value that all processes gave.

    Raises:
      BackendError: they differ; names the first field and both values.
    """
    first = values[0]
    for process, other in enumerate(values):
        for field in first.keys() | other.keys():
            if first.get(field) != other.get(field):
                raise BackendError(
                    f"exchange: {what} differ between processes: {field} is {first.get(field)!r} in "
                    "process 0 and "
                    f"{other.get(field)!r} in process {process}; expected the same everywhere. Build "
                    "the Exchange with the "
                    "same arguments, the same software and in the same order in every process."
                )
    return first
