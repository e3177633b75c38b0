"""Compiling for GPUs on a machine without one: run a snippet with the compile-only CUDA plugin, get its output back.

A snippet is Python source. It runs in a process of its own (the plugin must not be seen by the other tests, and jax
0.11.2 compiles Mosaic kernels for one architecture per process) and finds two names: `mesh(**axes)`, a mesh of
compile-only devices of the target, and `compiled(fn, mesh, in_specs, out_specs, *arguments)`, the scheduled HLO text of
`jit(shard_map(fn))` for arguments that are (global shape, dtype) pairs. It hands its result back with `answer(value)`.

The plugin's folder is named by the environment variable JAXCP_COMPILE_ONLY; `requires_plugin` skips tests without it.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

PLUGIN = os.environ.get("JAXCP_COMPILE_ONLY")
TARGETS = pathlib.Path(__file__).parent / "targets"
ARCHITECTURES = ("h200", "b200")
QUICK = "--xla_gpu_autotune_level=0 --xla_gpu_disable_gpuasm_optimizations"
"""Nothing is timed or run: kernels of XLA's own need neither the fastest variant nor ptxas's optimisations."""

requires_plugin = pytest.mark.skipif(
    not PLUGIN, reason="JAXCP_COMPILE_ONLY names no folder with the compile-only CUDA plugin (make test sets it)"
)

_PRELUDE = """
import json, math, pathlib
import jax, jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def mesh(**axes):
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x8", target_config=pathlib.Path({target!r}).read_text())
    count = math.prod(axes.values())
    return Mesh(np.array(topology.devices[:count]).reshape(*axes.values()), tuple(axes))

def compiled(fn, mesh, in_specs, out_specs, *arguments, **options):
    mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
              for (shape, dtype), spec in zip(arguments, in_specs, strict=True)]
    return mapped.lower(*shapes).compile().as_text()

def answer(value):
    pathlib.Path({output!r}).write_text(json.dumps(value))
"""


def run(snippet: str, tmp_path: pathlib.Path, architecture: str = "h200", timeout_s: float = 120):
    """What `snippet` answers when it runs beside the plugin for `architecture`."""
    output = tmp_path / "answer.json"
    target = str(TARGETS / f"{architecture}.txtpb")
    source = _PRELUDE.format(target=target, output=str(output)) + textwrap.dedent(snippet)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PLUGIN), str(pathlib.Path(__file__).parent)]), "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_FLAGS": QUICK,
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"the snippet failed:\n{done.stderr[-4000:]}"
    return json.loads(output.read_text())


def operations(hlo: str, *kinds: str) -> list[str]:
    """Names of the operations of these kinds in scheduled HLO, all computations, in schedule order.

    An asynchronous pair counts once: `all-gather` also finds `all-gather-start`.
    """
    assert "is_scheduled=true" in hlo.split("\n", 1)[0], "not scheduled HLO"
    found = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][\w\-]*)\(", hlo, re.MULTILINE)
    return [kind for kind in (name.removesuffix("-start") for name in found) if kind in kinds]


COLLECTIVES = ("all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective-permute")


def collectives(hlo: str) -> list[str]:
    """The collectives of a compiled program in schedule order."""
    return operations(hlo, *COLLECTIVES)


def pallas_kernels(hlo: str) -> list[str]:
    """Names of the Mosaic GPU kernels that a compiled program calls, in schedule order."""
    calls = [line for line in hlo.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    return [re.search(r'op_name="(?:[^"]*/)?(\w+)/\w+"', line)[1] for line in calls]
