"""Test environment: 8 virtual CPU devices unless JAXCP_TEST_PLATFORM names another platform ("cuda")."""

import os

PLATFORM = os.environ.setdefault("JAXCP_TEST_PLATFORM", "cpu")
# A callback takes its arguments to a CPU device; without one, to a GPU, which may be waiting for the callback.
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if PLATFORM == "cuda" else PLATFORM)
# NVLink multicast can put a shared host's GPUs out of service; nothing here may use it.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
if PLATFORM == "cuda":
    # Ranks simulated on one GPU wait for each other: each of their streams needs a queue of its own.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
if PLATFORM == "cpu":
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# Shapes and dtypes of every annotated function are checked in tests, and cost users nothing.
install_import_hook("jaxcp", "beartype.beartype")

# The same examples on every run, and no wall-clock limit per example: shared machines stall.
hypothesis.settings.register_profile("jaxcp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxcp")


@pytest.fixture(autouse=True, scope="module")
def quick_compiles(request):
    """Most tests spend their time in LLVM: on CPU it optimises only for modules marked `optimized`, which run long."""
    quick = PLATFORM == "cpu" and request.node.get_closest_marker("optimized") is None
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_collection_modifyitems(items):
    """Long tests first: at the end of a run no worker waits for another's last one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
