"""What `make demo` shows: the same text from a sharded cache, whatever the ranks and the exchange."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from jaxcp import exchange
from jaxcp.models import checkpoint
from jaxcp.models.decoder import Decoder
from jaxcp.models.generate import Generation, generate
from jaxcp.models.runtime import Runtime
from jaxcp.models.tokenizer import Tokenizer
from jaxcp.topology import make_mesh

PROMPT = "The capital of France is"
RANKS = (1, 2, 3, 8)
CAPACITY = 512
MAX_NEW = 16


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    backend: str
    cp: int
    generation: Generation
    equal: bool


def run(model: str = "smollm2", model_file: Any = None) -> bool:
    """Generates with every cp that fits and every usable backend, prints the table; whether all tokens are equal."""
    import jax
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    path = checkpoint.locate(model, model_file)
    console.print(f"reading {path.name}")
    weights = checkpoint.load(path)
    tokenizer = Tokenizer(weights.vocabulary)
    device = jax.devices()[0]
    table = Table(
        "backend",
        "cp",
        "ms/token",
        "KV bytes per rank",
        "tokens equal",
        title=f"{path.stem} on {len(jax.devices())} x {device.device_kind}",
    )
    rows = []
    for row in compare(weights, tokenizer.encode(PROMPT)):
        rows.append(row)
        console.print(f"cp {row.cp}  {row.backend:<9} {tokenizer.decode(row.generation.tokens[0])!r}")
        table.add_row(
            row.backend,
            str(row.cp),
            f"{row.generation.ms_per_token:.1f}",
            f"{row.generation.kv_bytes_per_rank:,}",
            "yes" if row.equal else "[bold red]NO[/]",
        )
    console.print(table)
    if skipped := [cp for cp in RANKS if cp > len(jax.devices())]:
        console.print(
            f"cp {', '.join(map(str, skipped))} left out: {len(jax.devices())} {device.platform} devices here"
        )
    return all(row.equal for row in rows)


def compare(model: checkpoint.Checkpoint, prompt: list[int]) -> Iterator[Row]:
    """Rows of the table as they are measured. The first one, a single device, is what the others must equal."""
    import jax

    expected = None
    for cp in (cp for cp in RANKS if cp <= len(jax.devices())):
        runtime = Runtime(model, make_mesh(cp), requests=1, capacity=CAPACITY)
        for backend in usable(runtime):
            done = generate(Decoder(runtime, backend), [prompt], max_new=MAX_NEW)
            expected = expected or done.tokens
            yield Row(backend, cp, done, done.tokens == expected)


def usable(runtime: Runtime) -> list[str]:
    """Backends without a blocker on the runtime's ranks, in order of preference.

    On CPU `fused` is among them, whose host twin is compiled on first use; a line says so.
    """
    config = runtime.config
    found = exchange.explain(
        runtime.mesh,
        runtime.axis_name,
        heads=config.heads,
        head_dim=config.head_dim,
        dtype="float32",
        max_tokens=runtime.requests,
    )
    return [name for name, blocker in found.blockers.items() if blocker is None]
