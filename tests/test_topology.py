"""Groups of ranks along a mesh axis, for concrete, abstract and compile-only meshes."""

import deviceless
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from jaxcp.topology import Topology, make_mesh


def ids(topology: Topology) -> list[list[int]]:
    return [[device.id for device in group] for group in topology.groups]


@pytest.mark.parametrize(("shape", "names", "groups"), [
    ((4,), ("cp",), [[0, 1, 2, 3]]),
    ((2, 3), ("data", "cp"), [[0, 1, 2], [3, 4, 5]]),
    ((3, 2), ("cp", "data"), [[0, 2, 4], [1, 3, 5]]),
    ((2, 2, 2), ("data", "cp", "tp"), [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ((2, 2, 2), ("cp", "data", "tp"), [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ((2, 1), ("data", "cp"), [[0], [1]]),
])  # fmt: skip
def test_groups_are_the_ranks_along_the_axis(shape, names, groups):
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)
    topology = Topology.of(mesh, "cp")
    assert ids(topology) == groups
    assert topology.size == mesh.shape["cp"]


def test_groups_agree_with_shard_map():
    """A rank's place in its group is its axis index, also where the mesh permutes the devices."""
    devices = np.array(jax.devices())[[3, 1, 7, 5, 0, 2, 6, 4]].reshape(4, 2)
    mesh = Mesh(devices, ("cp", "data"))
    where = jax.jit(
        jax.shard_map(
            lambda: jax.lax.axis_index("cp")[None, None],
            mesh=mesh,
            in_specs=(),
            out_specs=jax.P("cp", "data"),
            check_vma=False,
        )
    )()
    by_device = {shard.device: int(shard.data[0, 0]) for shard in where.addressable_shards}
    for group in Topology.of(mesh, "cp").groups:
        assert [by_device[device] for device in group] == [0, 1, 2, 3]


def test_facts_of_this_machine():
    topology = Topology.of(make_mesh(4), "cp")
    assert (topology.platform, topology.compute_capability) == ("cpu", None)
    assert topology.processes == (0,)
    assert topology.one_process
    assert topology.runnable
    assert [(group, rank, device.id) for group, rank, device in topology.local_ranks()] == [(0, r, r) for r in range(4)]


def test_abstract_mesh_has_sizes_and_no_devices():
    topology = Topology.of(AbstractMesh((2, 4), ("data", "cp")), "cp")
    assert (topology.size, topology.groups, topology.platform) == (4, (), "abstract")
    assert not topology.runnable
    assert str(topology) == "axis 'cp': 4 ranks on abstract, no devices"


def test_abstract_mesh_may_name_its_device():
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    topology = Topology.of(AbstractMesh((8,), ("cp",), abstract_device=device), "cp")
    assert (topology.platform, topology.device_kind) == ("gpu", "NVIDIA H200")


@deviceless.requires_plugin
def test_compile_only_mesh(tmp_path):
    facts = deviceless.run(
        """
    from jaxcp.topology import Topology
    t = Topology.of(mesh(data=2, cp=4), "cp")
    answer([t.size, len(t.groups), t.platform, t.device_kind, t.compute_capability, t.runnable, t.one_process])
    """,
        tmp_path,
    )
    assert facts == [4, 2, "gpu", "NVIDIA H200", [9, 0], False, True]


# Bad input.


def test_axis_not_in_the_mesh():
    with pytest.raises(ValueError, match=r"axis_name: got 'tp'; expected one of the mesh's axes \('cp',\)"):
        Topology.of(make_mesh(2), "tp")


@pytest.mark.parametrize("cp", [0, -1, 9, True])
def test_more_ranks_than_devices(cp):
    with pytest.raises(ValueError, match=rf"cp: got {cp}; expected 1 <= cp <= 8, the devices of platform cpu"):
        make_mesh(cp)
