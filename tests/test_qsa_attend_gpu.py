"""Sparse attention on a GPU: the kernels by themselves (tests/native/qsa_attend_cases.cu), the table through JAX.

Whole layers by "auto" are in test_qsa_select_gpu.py.
"""

import jax
import native_programs
import numpy as np
import pytest
import qsa_attention_cases as attention
from native_programs import CSRC
from qsa_cases import scanned

from jaxcp.qsa.sparse import ATTEND

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("one_gpu")]

CASES = ("shapes", "choices", "long_contexts", "nothing", "same_bits", "graphs", "small")
KERNELS = ("attend.cu", "attend_lists.cu", "attend_mma.cu", "attend_rows.cu", "attend_wgmma.cu", "heads.cu")


TestKernels = native_programs.cases_on_a_gpu(
    "qsa_attend_cases.cu",
    [CSRC / "qsa" / name for name in KERNELS],
    CASES,
    [("memcheck", ["small"]), ("racecheck", ["small"])],
)


@pytest.fixture
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU (JAXCP_TEST_PLATFORM=cuda)")


@pytest.mark.usefixtures("gpu")
class TestThroughJax:
    @pytest.mark.parametrize("implementation", ATTEND)
    @pytest.mark.parametrize("case", attention.CASES, ids=str)
    def test_matches_oracle(self, case, implementation):
        problem = case.problem("bfloat16")
        attention.check(problem, attention.run(ATTEND[implementation], problem))

    def test_scan_over_layers_replayed(self):
        problem = attention.SHARING[0].problem("bfloat16")
        again = attention.run(ATTEND["cuda"], problem, scanned)
        o, lse = again()
        attention.check(problem, (o, lse))
        for _ in range(4):  # the later ones replay a command buffer
            for got, first in zip(again(), (o, lse), strict=True):
                np.testing.assert_array_equal(got.astype(np.float32), first.astype(np.float32))
