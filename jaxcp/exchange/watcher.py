"""A thread that looks at all workspaces' status words and logs an expired wait once, while nobody calls `check`.

It reads host memory four times a second and never touches a device, so a step pays nothing for it.
"""

import logging
import threading
import time
import weakref
from typing import Protocol, runtime_checkable

from jaxcp.errors import JaxcpError

PERIOD_S = 0.25

log = logging.getLogger("jaxcp")


@runtime_checkable
class Watched(Protocol):
    """What can be watched: anything that says why it is dead, or None."""

    def expiry(self) -> str | None: ...


_watched: "weakref.WeakSet[Watched]" = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(workspace: Watched) -> None:
    """Logs the expiry of `workspace` when it comes, as long as somebody else keeps it alive."""
    global _thread
    with _lock:
        _watched.add(workspace)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="jaxcp-watcher", daemon=True)
            _thread.start()


def _run() -> None:
    reported: weakref.WeakSet[Watched] = weakref.WeakSet()
    while True:
        time.sleep(PERIOD_S)
        _look_at_all(reported)


def _look_at_all(reported: "weakref.WeakSet[Watched]") -> None:
    with _lock:
        watched = list(_watched)
    for workspace in watched:
        try:
            text = workspace.expiry()
        except JaxcpError:  # closed in this very moment
            continue
        if text is None:
            reported.discard(workspace)
        elif workspace not in reported:
            reported.add(workspace)
            log.error("%s", text)
