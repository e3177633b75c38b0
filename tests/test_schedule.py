"""What XLA schedules for the exchange on 8 H200s: how many collectives, which kernel."""

import deviceless
import pytest

pytestmark = deviceless.requires_plugin

EXCHANGE = """
import jaxcp
from jaxcp import LogBase, Partial

def program(backend, heads=128, tokens=32, dtype="bfloat16", return_lse=False, **axes):
    m = mesh(**axes)
    exchange = jaxcp.Exchange(m, "cp", max_tokens=tokens, heads=heads, head_dim=512, dtype=dtype, backend=backend)
    def step(o, lse):
        out = exchange(Partial(o[0], lse[0], LogBase.TWO), return_lse=return_lse)
        return jax.tree.map(lambda x: x[None], out)
    lse = (m.shape["cp"], tokens, heads)
    return compiled(step, m, (P("cp"), P("cp")), P("cp"), ((*lse, 512), dtype), (lse, "float32"))
"""


@pytest.fixture(scope="module")
def schedules(tmp_path_factory):
    """HLO of the exchange for each backend and a few variations, from one process."""
    return deviceless.run(
        EXCHANGE
        + """
programs = {name: program(name, cp=8) for name in ("a2a", "ag_rs", "allgather")}
programs["a2a lse"] = program("a2a", return_lse=True, cp=8)
programs["a2a odd heads"] = program("a2a", heads=9, cp=4)
programs["a2a data"] = program("a2a", data=2, cp=4)
answer(programs)
""",
        tmp_path_factory.mktemp("schedules"),
    )


@pytest.mark.parametrize("variant", ["a2a", "a2a lse", "a2a odd heads", "a2a data"])
def test_a2a_is_one_all_to_all_and_the_kernel(schedules, variant):
    hlo = schedules[variant]
    assert deviceless.collectives(hlo) == ["all-to-all"]
    assert deviceless.pallas_kernels(hlo) == ["lse_merge"]


def test_nothing_lies_between_the_all_to_all_and_the_merge(schedules):
    """The received buffer is merged in place: one kernel packs, none unpacks."""
    assert deviceless.operations(schedules["a2a"], "fusion", "copy", "all-to-all", "custom-call") == [
        "fusion",
        "all-to-all",
        "custom-call",
    ]


def test_ag_rs_is_one_all_gather_and_one_reduce_scatter(schedules):
    assert deviceless.collectives(schedules["ag_rs"]) == ["all-gather", "reduce-scatter"]


def test_allgather_uses_all_gathers_alone(schedules):
    assert set(deviceless.collectives(schedules["allgather"])) == {"all-gather"}
