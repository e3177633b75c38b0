"""Tables of the README from the records in benchmarks/: figures are never typed by hand.

A block of a file that starts with `<!-- table: benchmarks/NAME.json -->` and ends with `<!-- end -->` holds what
`markdown` makes of that record. `python -m jaxcp.bench.report README.md kernels/README.md docs/qsa.md` rewrites them.
"""

import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

from jaxcp.bench.prefill import balance_table as prefill_balance
from jaxcp.bench.prefill import ranks_table as prefill_ranks
from jaxcp.bench.prefill import table as prefill_shares
from jaxcp.bench.qsa import summary as qsa

BLOCK = re.compile(r"<!-- table: (?P<record>\S+) -->\n.*?<!-- end -->", re.DOTALL)


def updated(readme: str, root: pathlib.Path) -> str:
    """`readme` with every block's table made from its record below `root`.

    Raises:
      FileNotFoundError: a block names a record that does not exist.
      ValueError: a record is of no known kind.
    """

    def block(match: re.Match) -> str:
        name = match["record"]
        return f"<!-- table: {name} -->\n{markdown(json.loads((root / name).read_text()))}\n<!-- end -->"

    return BLOCK.sub(block, readme)


def markdown(record: dict[str, Any]) -> str:
    """The record's table, with a line that says where its figures come from."""
    kind = record.get("benchmark")
    if kind not in TABLES:
        raise ValueError(f"record: got benchmark = {kind!r}; expected one of {sorted(TABLES)}. Add a table for it.")
    return TABLES[kind](record)


def _lse_merge(record: dict[str, Any]) -> str:
    rows = [
        [row["sources"], row["tokens"], f"{row['bytes'] / 1e6:.2f}", f"{row['packed_us']:.2f}",
         f"{row['ratio_to_xla']:.2f}", f"{row['of_copy_rate']:.0%}", f"{row['packed_to_separate']:.2f}"]
        for row in record["rows"]
    ]  # fmt: skip
    heading = ["ranks", "tokens", "MB", "merge µs", "to XLA's fusion", "of copy rate", "packed to separate"]
    facts = (
        f"{record['heads']} heads of {record['dim']}, {record['dtype']}; copy rate "
        f"{record['copy_rate_tb_s']:.2f} TB/s, shortest kernel {record['shortest_kernel_us']:.2f} µs"
    )
    return _table(heading, rows) + _source(record["environment"]["device_kind"], facts, record)


def _simulated_ranks(record: dict[str, Any]) -> str:
    times = {(row["kernel"], row["cp"], row["tokens"]): row for row in record["rows"] if row["tokens"]}
    tokens = sorted({n for _, _, n in times})
    pairs = sorted({(cp, kernel) for kernel, cp, _ in times}, key=lambda pair: (pair[0], pair[1] != "fused"))
    lines = [
        [
            cp,
            kernel,
            *(f"{times[kernel, cp, n]['kernel_us']:.1f} / {times[kernel, cp, n]['cadence_us']:.1f}" for n in tokens),
        ]
        for cp, kernel in pairs
    ]
    return _table(["ranks", "kernel", *map(str, tokens)], lines) + _source(
        record["gpu"], f"{record['what']}. {record['unit']}", record
    )


def _exchange(record: dict[str, Any]) -> str:
    times = {(row["backend"], row["tokens"]): row for row in record["rows"]}
    tokens, backends = sorted({n for _, n in times}), dict.fromkeys(name for name, _ in times)
    lines = [[name, *(_clocks(times.get((name, n), {})) for n in tokens)] for name in backends]
    facts = (
        f"{record['cp']} ranks, {record['heads']} heads of {record['dim']}, {record['dtype']}; µs per layer of "
        f"{record['layers']}, of the slowest rank: kernels / cadence / eager"
    )
    return _table(["backend", *map(str, tokens)], lines) + _source(record["environment"]["device_kind"], facts, record)


def _qsa(record: dict[str, Any]) -> str:
    facts = (
        f"{record['heads']} heads of {record['head_dim']} on {record['kv_heads']} KV heads, {record['budget']} tokens "
        f"in blocks of {record['ratio']}, {record['dtype']}; floors: {record['products_tflop_s']:.0f} TFLOP/s, "
        f"gathers {record['gather_tb_s']:.0f} TB/s, reads {record['copy_rate_tb_s']:.2f} TB/s (measured copies)"
    )
    tables = [_table(list(qsa.PREFILL), qsa.prefill(record)), _table(list(qsa.DECODE), qsa.decode(record))]
    if flags := record["environment"]["xla_flags"]:
        facts += f"; `XLA_FLAGS={flags}`"
    source = _source(record["environment"]["device_kind"], f"{facts}. {qsa.EXPLAINED}", record)
    return "\n\n".join(tables) + source


def _prefill(record: dict[str, Any]) -> str:
    kind = {"prefill_balance": prefill_balance, "prefill_share": prefill_shares}.get(record["benchmark"], prefill_ranks)
    facts = (
        f"{record['layers']} layers in one program: {record['heads']} heads of {record['head_dim']} on "
        f"{record['kv_heads']} KV heads, {record['budget']} tokens in blocks of {record['ratio']}, {record['dtype']}"
    )
    if flags := record["environment"]["xla_flags"]:
        facts += f"; `XLA_FLAGS={flags}`"
    source = _source(record["environment"]["device_kind"], f"{facts}. {kind.EXPLAINED}", record)
    return _table(list(kind.HEADING), list(kind.lines(record))) + source


def _clocks(row: dict[str, Any]) -> str:
    """The three clocks; nothing for what was not measured."""
    clocks = [row[name] for name in ("kernel_us", "cadence_us", "eager_us")] if row else []
    return " / ".join("-" if us is None else f"{us:.1f}" for us in clocks)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "exchange": _exchange, "lse_merge": _lse_merge, "prefill_balance": _prefill,
    "prefill_ranks": _prefill, "prefill_share": _prefill, "qsa": _qsa, "simulated_ranks": _simulated_ranks,
}  # fmt: skip
"""Kind of record -> its table."""


def _table(heading: list[str], rows: list[list[Any]]) -> str:
    lines = [heading, ["-:"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _source(gpu: str, facts: str, record: dict[str, Any]) -> str:
    return f"\n\n{gpu}, {record['date'][:10]}, `{record['command']}`; {facts}."


def main(*paths: str) -> None:
    """Rewrites the tables of these files; run it where benchmarks/ is."""
    for path in map(pathlib.Path, paths):
        text = path.read_text(encoding="utf-8")
        path.write_text(updated(text, pathlib.Path.cwd()), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
