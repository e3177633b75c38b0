"""What pictures of records have in common: formats, and files that are the same for the same record."""

import contextlib
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxcp.errors import BackendError, invalid

FORMATS = (".svg", ".png", ".pdf")
MARKERS = "osD^vPX*<>pdhH8"  # more than the ten colours, so that no two names look alike


def check(path: str | os.PathLike[str]) -> None:
    """Raises unless a picture can be written there: ask before a long measurement.

    Raises:
      ValueError: a format that is not drawn.
      BackendError: matplotlib is not installed.
    """
    if (suffix := pathlib.Path(path).suffix) not in FORMATS:
        raise invalid("plot", repr(suffix), f"a file named {' or '.join(FORMATS)}", "Choose another name.")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError("plot: matplotlib is not installed; expected it. pip install 'jaxcp[bench]'.")


@contextlib.contextmanager
def subplots(path: str | os.PathLike[str], title: str, columns: int, **options: Any) -> Iterator[Any]:
    """The axes of a figure of one row, which goes to the file `path` with a common legend below.

    Args:
      options: of `matplotlib.pyplot.subplots`.

    Raises:
      ValueError, BackendError: as `check` does.
    """
    check(path)
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxcp"  # the same record gives the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, layout="constrained", squeeze=False, **options)
    axes = axes[0]
    try:
        yield axes
        handles = {}
        for axis in axes:
            handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False)
        figure.suptitle(title)
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    finally:
        plt.close(figure)
