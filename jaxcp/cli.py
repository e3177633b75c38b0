"""The command line. Commands are thin and import what they run on use, so that `jaxcp --help` needs no jax."""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from jaxcp.errors import JaxcpError, invalid

DEMO_DEVICES = 8


class _Commands(TyperGroup):
    """Ends what the library raises as one line on stderr and exit code 2; `--debug` shows the traceback."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (JaxcpError, ValueError, TypeError, NotImplementedError, OSError) as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            typer.echo(f"jaxcp: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(cls=_Commands, help="Context-parallel attention for JAX.", no_args_is_help=True, add_completion=False)


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    """Context-parallel attention for JAX."""


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue, verbatim.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file, verbatim.")] = None,
    model: Annotated[str, typer.Option(help="A known model.")] = "smollm2",
    model_file: Annotated[Path | None, typer.Option(help="A llama GGUF file to read instead.")] = None,
    cp: Annotated[int, typer.Option(help="Ranks that share the KV cache.")] = 1,
    backend: Annotated[str, typer.Option(help="Exchange: auto, or a name that `jaxcp doctor` lists.")] = "auto",
    max_new: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    speculate: Annotated[int, typer.Option(help="Tokens drafted by prompt look-up and verified per step.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Result as the last line of stdout.")] = False,
    processes: Annotated[int, typer.Option(help="Processes of this host that share the ranks.")] = 1,
    limit: Annotated[float, typer.Option(help="Seconds after which --processes ends what still runs.")] = 3600.0,
) -> None:
    """Continue a prompt greedily with a real model whose KV cache is split over the ranks."""
    from jaxcp import launch
    from jaxcp.models import completion

    text = completion.prompt_text(prompt, file)
    request = completion.Request(text, model, model_file, cp, backend, max_new, speculate, ignore_eos)
    if processes != 1 and not launch.launched():
        _relaunch(processes, cp, limit)
        return
    launch.virtual_devices(max(cp, 1))
    with launch.joined() as process, open(os.devnull, "w") as nowhere:
        stream = nowhere if process else sys.stderr if as_json else sys.stdout
        record = completion.complete(request, stream, sys.stderr)
        launch.report(record)
    if as_json and process == 0:
        typer.echo(json.dumps(record))


@app.command()
def demo() -> None:
    """Decode a prompt with cp = 1, 2, 3, 8 and every backend, run a QSA layer over 8K tokens on one device and on 8.

    Fails on a difference.
    """
    from jaxcp import launch

    launch.virtual_devices(DEMO_DEVICES)
    from jaxcp.models import demo as decode_demo
    from jaxcp.qsa import demo as qsa_demo
    from jaxcp.qsa import demo_ranks

    parts = {"tokens": decode_demo, "QSA rows": qsa_demo, "context-parallel QSA rows": demo_ranks}
    differ = [what for what, part in parts.items() if not part.run()]
    if differ:
        typer.echo(f"jaxcp: {' and '.join(differ)} differ", err=True)
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Show devices, peers, compilers, versions, and which exchange would be taken and why."""
    from jaxcp import launch

    launch.virtual_devices(DEMO_DEVICES)
    from rich.console import Console

    from jaxcp import doctor

    doctor.render(doctor.examine(), Console())


@app.command()
def build(
    variant: Annotated[str, typer.Argument(help="cpu (the host twin) or cuda; what jax runs on, if left out.")] = "",
    arch: Annotated[list[str] | None, typer.Option(help="GPU architectures, e.g. sm_90a; those present.")] = None,
    nvcc: Annotated[str | None, typer.Option(help="Path of nvcc; searched if left out.")] = None,
    cxx: Annotated[str | None, typer.Option(help="Path of the host compiler; searched if left out.")] = None,
) -> None:
    """Build the native library now rather than on first use, and print its path."""
    import jax

    from jaxcp import native

    variant = variant or {"gpu": "cuda"}.get(jax.default_backend(), "cpu")
    if variant not in ("cpu", "cuda"):
        raise invalid("variant", repr(variant), "'cpu' or 'cuda'", "Name one of the libraries.")
    typer.echo(native.build(variant, architectures=arch, nvcc=nvcc, cxx=cxx))


bench = typer.Typer(help="Measure, with floors and other implementations beside it.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.callback()
def benchmarks() -> None:
    """Measure, with floors and other implementations beside it."""


@bench.command()
def exchange(
    cp: Annotated[int, typer.Option(help="Ranks; 1 measures the merge alone. All GPUs if left out, at most 8.")] = 0,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of the batch; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw several ranks' into this file (.svg, .png).")] = None,
    repeat: Annotated[int, typer.Option(help="Runs per measurement; medians are reported.")] = 50,
) -> None:
    """The exchange between ranks, every backend on the same work; on one GPU its merge, beside XLA's."""
    import jax
    from rich.console import Console

    from jaxcp.bench import exchange, ranks, ranks_plot
    from jaxcp.bench import plot as picture

    cp = cp or (min(8, jax.device_count()) if jax.default_backend() == "gpu" else 1)
    if plot is not None:
        picture.check(plot)
        if cp == 1:
            raise invalid("plot", plot, "--cp of at least 2 with it", "The merge on one GPU is not drawn.")
    if cp > 1:
        tokens = tokens or list(ranks.TOKENS)
        progress = Console(stderr=True)
        record = ranks.run(cp, tokens=tokens, output=output, repeat=repeat, console=Console(), progress=progress)
        if plot is not None and jax.process_index() == 0:
            ranks_plot.draw(record, plot)
    else:
        exchange.run(tokens=tokens or exchange.TOKENS, output=output, repeat=repeat, console=Console())


@bench.command()
def qsa(
    rows: Annotated[list[int] | None, typer.Option(help="Only the cases with so many query rows; repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two small cases.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw them into this file (.svg, .png).")] = None,
    repeat: Annotated[int, typer.Option(help="Runs per measurement; medians are reported.")] = 20,
) -> None:
    """A QSA layer on one GPU, part by part: every implementation, beside its peers and its floors."""
    from rich.console import Console

    from jaxcp.bench import plot as picture
    from jaxcp.bench.qsa import plot as qsa_picture
    from jaxcp.bench.qsa.run import cases, run

    if plot is not None:
        picture.check(plot)
    record = run(cases(rows, quick), output=output, repeat=repeat, console=Console())
    if plot is not None:
        qsa_picture.draw(record, plot)


@bench.command()
def prefill(
    cases: Annotated[
        list[str] | None,
        typer.Option(help="8K, ragged, 8K+56K, 32K, 4x8K, 8x4K, 512s+4K, 128K; repeatable."),
    ] = None,
    cp: Annotated[
        list[int] | None, typer.Option(help="Ranks; repeatable. All GPUs; of a share 4 and 8; with --balance 4.")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="One rank's share, also where there are several GPUs.")
    ] = False,
    balance: Annotated[
        bool, typer.Option("--balance", help="Shares of all ranks, cut evenly and by cost: what that gains.")
    ] = False,
    layers: Annotated[int, typer.Option(help="QSA layers of the stack.")] = 12,
    selected: Annotated[
        list[str] | None, typer.Option(help="Of a share: own, or a model (random); repeatable.")
    ] = None,
    ways: Annotated[list[str] | None, typer.Option(help="Of all ranks: local, inline, ...; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw them into this file (.svg, .png).")] = None,
    repeat: Annotated[int, typer.Option(help="Runs per measurement; medians are reported.")] = 20,
    small: Annotated[bool, typer.Option("--small", help="Sizes for CPU devices; measures nothing.")] = False,
) -> None:
    """Context-parallel prefill through a stack of QSA layers: on all GPUs; on one, the share of a rank."""
    from jaxcp import launch

    launch.virtual_devices(DEMO_DEVICES)
    from jaxcp.bench.prefill import command

    command.main(
        cases=cases, cp=cp, share=share, balance=balance, selected=selected, ways=ways, output=output, plot=plot,
        small=small, layers=layers, repeat=repeat,
    )  # fmt: skip


@bench.command()
def overlap(
    text: Annotated[Path | None, typer.Argument(help="Text of a compiled program; left out: prefill's.")] = None,
    cp: Annotated[int | None, typer.Option(help="Ranks of prefill; all devices, at most 8.")] = None,
    schedules: Annotated[list[str] | None, typer.Option(help="inline, kv_first, overlapped; repeatable.")] = None,
    layers: Annotated[int, typer.Option(help="QSA layers of the stack.")] = 2,
    small: Annotated[bool, typer.Option("--small", help="Sizes for CPU devices.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="For programs instead of a table.")] = False,
) -> None:
    """What runs behind the collectives of a compiled program, by its schedule; nothing is timed."""
    from jaxcp import launch

    launch.virtual_devices(DEMO_DEVICES)
    from jaxcp.bench import overlap as command

    command.main(text=text, cp=cp, schedules=schedules, layers=layers, small=small, as_json=json_output)


plots = typer.Typer(help="Draw what was measured or compiled.", no_args_is_help=True)
app.add_typer(plots, name="plot")


@plots.callback()
def pictures() -> None:
    """Draw what was measured or compiled."""


@plots.command()
def record(
    file: Annotated[Path, typer.Argument(help="JSON file that `jaxcp bench ... --output` wrote.")],
    picture: Annotated[Path, typer.Argument(help="File to draw into (.svg, .png).")],
) -> None:
    """The figures of a benchmark, also of one that was stopped on the way."""
    from jaxcp.bench import pictures

    pictures.draw(file, picture)


@plots.command()
def timeline(
    source: Annotated[Path, typer.Argument(help="A profile (folder or .xplane.pb), or a compiled program's text.")],
    picture: Annotated[Path, typer.Argument(help="File to draw into (.svg, .png, .pdf).")],
    device: Annotated[int, typer.Option(help="GPU of a profile.")] = 0,
    start: Annotated[float | None, typer.Option(help="From here on, in the picture's unit.")] = None,
    stop: Annotated[float | None, typer.Option(help="Up to here.")] = None,
) -> None:
    """Streams in time, part by part, of a profile's last run; or a compiled program's order."""
    from jaxcp.bench import timeline, timeline_plot

    timeline_plot.draw(timeline.read(source, device).between(start, stop), picture)


def _relaunch(processes: int, cp: int, limit_s: float) -> None:
    """Runs this very command in `processes` processes and ends as they do."""
    from jaxcp import launch

    if processes < 1 or cp % processes:
        raise invalid(
            "processes", processes, f"a divisor of cp = {cp}", "Every process holds the same number of ranks."
        )
    outcomes = launch.run(
        ["-m", "jaxcp.cli", *sys.argv[1:]], processes, devices=cp // processes, limit_s=limit_s, show_first=True
    )
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    for failure in failures:
        typer.echo(f"jaxcp: {failure}", err=True)
    if failures:
        raise typer.Exit(max(outcome.exit_code or 1 for outcome in outcomes))


def main() -> None:
    """Entry point of the `jaxcp` command."""
    for name in ("stdout", "stderr"):  # a program whose streams are closed or cannot show a letter still runs
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for the life of the process
        getattr(sys, name).reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
