"""A device mesh of this process alone, so that sharded weights (DTensor) need no other."""

from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

# Gloo's destructor joins its threads with the lock of the interpreter held, and a thread that still
# releases its last work waits for that lock. So a group lives as long as the process.
_GROUPS = []


@contextmanager
def one_mesh(*sizes):
    """Yield a mesh over the CPU whose only rank is this process; default: 1 x ... x 1 ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _GROUPS.append(dist.group.WORLD)
    try:
        yield init_device_mesh("cpu", sizes or (1,))
    finally:
        dist.destroy_process_group()
