"""Which rank holds what: one arrangement of the ranks for experts, one for everything else.

    replicate    groups of ranks with a copy of the whole model each (HSDP); most runs have one
    fsdp         within such a group: ranks with the same experts, which shard them further
    expert       ranks that share out the experts of a layer and send each other tokens; neighbours

Ranks are numbered replicate first, expert last. Everything but experts is sharded over fsdp and expert
together ("shard"). Every rank has tokens of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nybble.errors import ConfigError

EXPERT = "expert"


@dataclass(frozen=True)
class Mesh:
    """Both arrangements of all ranks."""

    sparse: DeviceMesh
    """(replicate, fsdp, expert): where experts are."""
    dense: DeviceMesh
    """(replicate, shard): where the rest is."""

    @property
    def expert_parallel(self) -> int:
        """Ranks that share out experts."""
        return self.sparse[EXPERT].size()

    @property
    def copies(self) -> bool:
        """Whether each rank has the whole model."""
        return self.sparse["replicate"].size() == self.sparse.size()

    @cached_property
    def holders(self) -> DeviceMesh:
        """(replicate, shard), or (shard) alone, for experts that are shared out along fsdp and expert: ranks
        with the same ones are neighbours."""
        whole = self.dense
        if self.expert_parallel > 1:
            order = self.sparse.mesh.transpose(1, 2).flatten(1)
            whole = DeviceMesh(self.sparse.device_type, order, mesh_dim_names=("replicate", "shard"))
        return whole if whole["replicate"].size() > 1 else whole["shard"]

    def text(self) -> str:
        """`8 ranks: 1 replicate x 2 fsdp x 4 expert`."""
        sizes = zip(self.sparse.shape, self.sparse.mesh_dim_names or (), strict=True)
        return f"{self.sparse.size()} ranks: " + " x ".join(f"{size} {name}" for size, name in sizes)


def make_mesh(device_type: str, *, experts: int = 0, expert_parallel: int = 0, replicate: int = 1) -> Mesh:
    """The mesh of all ranks of the run.

    Args:
        device_type: "cpu" or "cuda".
        experts: experts of a layer; 0 if the model has none.
        expert_parallel: ranks that share them out; 0 is as many as divide both the ranks and the experts.
        replicate: groups with a copy of the model each.
    Raises:
        ConfigError: where the ranks cannot be divided so.
    """
    world = dist.get_world_size()
    if replicate < 1 or world % replicate:
        raise ConfigError(f"replicate is {replicate}, which does not divide the {world} ranks")
    group = world // replicate
    if expert_parallel == 0:
        expert_parallel = math.gcd(group, experts) if experts else 1
    if expert_parallel < 0 or group % expert_parallel:
        whole = f"{world} ranks" if replicate == 1 else f"{group} ranks of each of {replicate} groups"
        raise ConfigError(f"expert_parallel is {expert_parallel}, which does not divide the {whole}")
    if experts % expert_parallel:
        raise ConfigError(
            f"expert_parallel is {expert_parallel}, but {experts} experts cannot be shared out equally among "
            f"so many ranks; the largest number that fits is {math.gcd(group, experts)}"
        )
    fsdp = group // expert_parallel
    return Mesh(
        sparse=init_device_mesh(
            device_type, (replicate, fsdp, expert_parallel), mesh_dim_names=("replicate", "fsdp", EXPERT)
        ),
        dense=init_device_mesh(device_type, (replicate, group), mesh_dim_names=("replicate", "shard")),
    )


def expert_mesh(mesh: Mesh | DeviceMesh) -> DeviceMesh:
    """The expert dimension of a mesh: the one of that name, or the only one."""
    if isinstance(mesh, Mesh):
        return mesh.sparse[EXPERT]
    if EXPERT in (mesh.mesh_dim_names or ()):
        return mesh[EXPERT]
    if mesh.ndim == 1:
        return mesh
    raise ConfigError(
        f"a mesh of {mesh.ndim} dimensions needs one that is called {EXPERT!r}; "
        f"this one has {', '.join(mesh.mesh_dim_names or ('no names',))}"
    )


def part(mesh: Mesh | DeviceMesh) -> int:
    """Which of the consecutive parts of a batch this rank has: its place among all ranks of the mesh."""
    whole = mesh.sparse if isinstance(mesh, Mesh) else mesh
    coordinate = whole.get_coordinate()
    assert coordinate is not None
    index = 0
    for size, at in zip(whole.shape, coordinate, strict=True):
        index = index * size + at
    return index
