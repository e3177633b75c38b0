"""The parts of a layer as programs to measure: selection and attention by each implementation, and the whole."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcp import qsa
from jaxcp.bench._measure import Program
from jaxcp.bench.qsa.cases import Inputs
from jaxcp.qsa.forward import mix
from jaxcp.qsa.layer import products
from jaxcp.qsa.numerics import linear
from jaxcp.qsa.resolve import Implementation, blockers_of


def usable(table: dict[str, Implementation], inputs: Inputs) -> tuple[dict[str, Callable], dict[str, str]]:
    """Implementations of a table by name, the best first, and why each of the others cannot serve these inputs."""
    blockers = blockers_of(table, inputs.config, inputs.cache)
    functions = {name: table[name].run for name, blocker in blockers.items() if blocker is None}
    return functions, {name: blocker for name, blocker in blockers.items() if blocker is not None}


def select(function: Callable, inputs: Inputs) -> Program:
    """Scoring and selection by one implementation."""
    case, config = inputs.case, inputs.config

    def run(index_q, cache, layer, table):
        return function(index_q, cache, layer, case.queries(table), config)

    return Program(run, (inputs.projected.index_q, inputs.cache, inputs.layer, inputs.table))


def attend(function: Callable, inputs: Inputs) -> Callable[[jax.Array], Program]:
    """Attention by one implementation over a selection that is given later; all share one executable."""
    case, config = inputs.case, inputs.config

    def run(q, blocks, cache, layer, table):
        partial = function(q, blocks, cache, layer, case.queries(table), config)
        return partial.o, partial.lse

    return lambda blocks: Program(run, (inputs.q, blocks, inputs.cache, inputs.layer, inputs.table))


def mixer(inputs: Inputs, implementation: str = "auto") -> Program:
    """All between input and output products: norms, rotations, cache, selection, attention, gate."""
    case = inputs.case

    def run(cache, params, of, layer, table):
        bounds = {"context": case.keys, "longest": case.each}
        segments = case.queries(table).segments
        mixed, _, cache, blocks = mix(params, of, cache, segments, None, layer, **bounds, implementation=implementation)
        return cache, (mixed, blocks)

    return Program(run, (_copy(inputs.cache), inputs.params, inputs.of, inputs.layer, inputs.table), carried=1)


def projections(inputs: Inputs) -> Program:
    """Input and output products."""
    features = inputs.params.o_proj.shape[1]

    def run(params, x, mixed):
        return products(params, x), linear(mixed, params.o_proj)

    return Program(run, (inputs.params, inputs.x, inputs.of.q_gate[:, :features]))


def layer(inputs: Inputs, implementation: str = "auto") -> Program:
    """The whole layer as users call it: `qsa.decode` where every request has few rows, `qsa.prefill` otherwise."""
    case, options = inputs.case, {"implementation": implementation, "return_selection": True}
    if case.each <= inputs.cache.max_query_tokens:
        lengths = jnp.full(case.requests, case.keys, jnp.int32)

        def run_decode(cache, params, x, lengths):
            y, cache, blocks = qsa.decode(params, x, cache, lengths, **options)  # pyright: ignore[reportAssignmentType]
            return cache, (y, blocks)

        return Program(run_decode, (_copy(inputs.cache), inputs.params, inputs.x, lengths), carried=1)
    lengths = [case.each] * case.requests
    plan = qsa.plan(lengths, [case.keys - case.each] * case.requests, cache=inputs.cache, min_context=case.keys)

    def run_prefill(cache, params, x, plan):
        y, cache, blocks = qsa.prefill(params, x, cache, plan, **options)  # pyright: ignore[reportAssignmentType]
        return cache, (y, blocks)

    return Program(run_prefill, (_copy(inputs.cache), inputs.params, plan.pad(inputs.x), plan), carried=1)


def _copy(cache: qsa.Cache) -> qsa.Cache:
    return jax.tree.map(jnp.copy, cache)
