"""Several ranks: experts shared out among them with compressed traffic, FSDP2 for the rest."""

from nybble.parallel.convert import convert
from nybble.parallel.mesh import Mesh, make_mesh
from nybble.parallel.shard import shard
from nybble.parallel.wire import Monitor

__all__ = ["Mesh", "Monitor", "convert", "make_mesh", "shard"]
