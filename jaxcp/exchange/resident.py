"""What the backends that own memory share: a workspace, unless there are no peers or nothing can be run."""

import itertools
from typing import Any

from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.exchange.workspace import Workspace


class WorkspaceEngine:
    """Base of `fused` and `flashinfer`.

    Attributes:
      workspace: of this exchange, or None.
      sites: numbers of its calls, in the order in which they are traced.
    """

    def __init__(self, spec: ExchangeSpec, workspace: Workspace | None):
        self.spec, self.workspace, self.sites = spec, workspace, itertools.count()

    @property
    def number(self) -> int:
        """Of the exchange in compiled programs; -1 for a program that is only compiled."""
        return self.workspace.number if self.workspace else -1

    def check(self) -> None:
        """Raises PeerTimeoutError once a rank of this process has waited in vain."""
        if self.workspace:
            self.workspace.check()

    def reset(self) -> None:
        """Collective: readies the workspace again, if all devices have come to rest."""
        if self.workspace:
            self.workspace.reset()

    def close(self) -> None:
        """Collective: gives the memory back."""
        if self.workspace:
            self.workspace.close()

    def describe(self) -> dict[str, Any]:
        """Bytes sent per call, and the workspace."""
        spec = self.spec
        row = spec.head_dim * spec.dtype.itemsize + 4
        sent = {"bytes_sent_per_call": (spec.cp - 1) * spec.max_tokens * spec.heads_per_rank * row}
        return sent | (self.workspace.describe() if self.workspace else {})
