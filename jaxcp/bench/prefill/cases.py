"""What is measured: batches of new tokens on cached prefixes, those of the published benchmark."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxcp import qsa
from jaxcp.errors import invalid
from jaxcp.layout import Split, Zigzag
from jaxcp.qsa.balance import of_ranks

PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """New tokens of each request, and the tokens that the cache holds of it already."""

    name: str
    lengths: tuple[int, ...]
    prefix: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """New tokens."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its prefix included."""
        return max(n + p for n, p in zip(self.lengths, self.prefix, strict=True))

    @property
    def positions(self) -> np.ndarray:
        """Of every new token in its request: int [tokens], packed."""
        return np.concatenate([np.arange(p, p + n) for n, p in zip(self.lengths, self.prefix, strict=True)])

    def plan(self, cache: qsa.Cache, cp: int, **options) -> qsa.Plan:
        """Of the batch, for `cp` ranks."""
        return qsa.plan(self.lengths, self.prefix, cache=cache, cp=cp, **options)

    def split(self, plan: qsa.Plan) -> Split:
        """The batch as the plan deals it out, in host integers."""
        assert isinstance(plan.layout, Zigzag)
        lengths = np.array(self.lengths)
        return plan.layout.split(lengths, None if plan.starts is None else np.asarray(plan.starts)[: len(lengths)])

    def costs(self, cost: qsa.Cost, plan: qsa.Plan) -> np.ndarray:
        """What every rank's rows cost: [cp]."""
        return of_ranks(cost, self.split(plan), np.array(self.prefix))

    def busiest(self, config: qsa.QSAConfig, plan: qsa.Plan) -> int:
        """The rank whose rows cost most, by FLOP."""
        return int(self.costs(qsa.Cost.of(config), plan).argmax())


def _of(name: str, *requests: tuple[int, int]) -> Case:
    return Case(name, *zip(*requests, strict=True))


CASES = {
    case.name: case
    for case in (
        _of("8K", (8192, 0)), _of("ragged", (3000, 64), (5192, 0)), _of("8K+56K", (8192, 57344)),
        _of("32K", (32768, 0)), _of("4x8K", *[(8192, 0)] * 4),
        _of("8x4K", *[(4096, 0)] * 8), _of("512s+4K", *[(512, 0)] * 8, *[(4096, 0)] * 3), _of("128K", (131072, 0)),
    )
}  # fmt: skip
"""Cases by name; ragged: 3000 tokens on a prefix of 64, and 5192; 512s+4K: eight requests of 512, three of 4096."""

SMALL_CASES = {
    case.name: case for case in (_of("96", (96, 0)), _of("ragged", (29, 8), (60, 0)), _of("32+64", (32, 64)))
}
"""Batches that virtual CPU devices can compute."""

SMALL = dataclasses.replace(
    qsa.QSAConfig.flash_next(), hidden=32, heads=6, head_dim=16, rotary_dim=8, mrope_section=(2, 1, 1), index_heads=2,
    index_dim=16, budget=32,
)  # fmt: skip
"""Their geometry."""


def named(names: Iterable[str] | None, known: dict[str, Case]) -> list[Case]:
    """The cases of these names in the order of the table; all if None.

    Raises:
      ValueError: no case has such a name.
    """
    wanted = set(known if names is None else names)
    if unknown := wanted - known.keys():
        raise invalid("cases", sorted(unknown), f"some of {list(known)}", "Name cases of the benchmark.")
    return [case for name, case in known.items() if name in wanted]
