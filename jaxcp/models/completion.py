"""One prompt from text to text: what `jaxcp generate` does."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from jaxcp.errors import invalid
from jaxcp.layout import positive_int
from jaxcp.models.speculation import check_speculate
from jaxcp.topology import make_mesh


@dataclasses.dataclass(frozen=True)
class Request:
    """What to complete and how.

    Attributes:
      prompt: text, taken verbatim: no strip, no template, no start token.
      model: name of a known model.
      model_file: a GGUF file to read instead.
      cp: ranks.
      backend: of the exchange, or "auto".
      max_new: tokens to generate at most.
      speculate: tokens drafted per step.
      ignore_eos: go on after the end token.
    """

    prompt: str
    model: str = "smollm2"
    model_file: Path | None = None
    cp: int = 1
    backend: str = "auto"
    max_new: int = 64
    speculate: int = 0
    ignore_eos: bool = False

    def __post_init__(self):
        positive_int("cp", self.cp)
        positive_int("max_new", self.max_new)
        check_speculate(self.speculate)


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The prompt given as text or as a UTF-8 file, verbatim.

    Raises:
      ValueError: both, neither, or a file that is not UTF-8.
      FileNotFoundError: no such file.
    """
    if (prompt is None) == (file is None):
        raise invalid("prompt", "a prompt and a file" if file else "nothing", "a prompt or --file", "Give one of them.")
    if file is None:
        assert prompt is not None
        return prompt
    if not file.exists() or file.is_dir():
        raise invalid("file", str(file), "an existing text file", "Check the path.", FileNotFoundError)
    try:
        return file.read_bytes().decode()  # not read_text: it would translate line ends
    except UnicodeDecodeError as bad:
        raise invalid(
            "file", f"{file}, whose byte {bad.start} is not UTF-8", "a UTF-8 text file", "Convert it."
        ) from bad


def complete(request: Request, out: TextIO, status: TextIO) -> dict[str, Any]:
    """Generates, writing text to `out` as it comes and progress to `status`; returns the record of `--json`.

    Raises:
      ValueError, TypeError, FileNotFoundError, NotImplementedError: bad arguments or files, before any device work.
      JaxcpError: the machine refuses.
    """
    import jax

    from jaxcp.models import checkpoint, runtime
    from jaxcp.models.decoder import Decoder
    from jaxcp.models.generate import generate
    from jaxcp.models.tokenizer import Tokenizer

    path = checkpoint.locate(request.model, request.model_file)
    mesh = make_mesh(request.cp)
    with _timed(f"reading {path.name}", status):
        model = checkpoint.load(path)
        tokenizer = Tokenizer(model.vocabulary)
    prompt = tokenizer.encode(request.prompt)
    runtime.check_context(len(prompt), request.max_new, model.config.context)
    capacity = len(prompt) + request.max_new + request.speculate
    ranks = runtime.Runtime(model, mesh, requests=1, capacity=capacity)
    decoder = Decoder(ranks, request.backend, request.speculate)
    with _timed(f"placing weights on {request.cp} x {mesh.devices.flat[0].platform}", status):
        jax.block_until_ready(ranks.weights)

    text = tokenizer.stream()

    def write(piece: str) -> None:
        out.write(piece)
        out.flush()

    end = None if request.ignore_eos else tokenizer.end
    done = generate(
        decoder,
        [prompt],
        max_new=request.max_new,
        end=end,
        progress=progress_line(status),
        on_token=lambda token: write("" if token.id == end else text.push(token.id)),
    )
    write(text.rest() + "\n")
    tokens = done.tokens[0]
    status.write(
        f"{len(tokens)} tokens in {done.steps} steps, {done.ms_per_token:.1f} ms/token, {1e3 / done.ms_per_token:.1f} "
        f"tokens/s, KV cache {done.kv_bytes_per_rank} bytes per rank, "
        f"cp {request.cp}, backend {decoder.exchange.backend}\n"
    )
    return {
        "prompt_tokens": prompt,
        "tokens": tokens,
        "text": tokenizer.decode(tokens[:-1] if tokens[-1] == end else tokens),
        "cp": request.cp,
        "backend": decoder.exchange.backend,
        "ms_per_token": done.ms_per_token,
        "kv_bytes_per_rank": done.kv_bytes_per_rank,
    }


def progress_line(status: TextIO) -> Callable[[int, int], None]:
    """A callback that reports how much of a long prompt has been read."""

    def report(done: int, total: int) -> None:
        if total > 1000:
            status.write(f"reading the prompt: {done} of {total} tokens\n")
            status.flush()

    return report


@contextmanager
def _timed(what: str, status: TextIO) -> Iterator[None]:
    start = time.perf_counter()
    status.write(f"{what} ... ")
    status.flush()
    yield
    status.write(f"{time.perf_counter() - start:.1f} s\n")
