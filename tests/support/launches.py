"""Counts what a GPU would launch, and what it would wait for."""

from torch.utils._python_dispatch import TorchDispatchMode

READS = ("aten._local_scalar", "aten.equal", "aten.is_nonzero", "aten.nonzero")


class Launches(TorchDispatchMode):
    """Operations that are no views, and those whose result the host reads."""

    def __init__(self):
        super().__init__()
        self.total = self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += not func.is_view
        self.reads += str(func).startswith(READS)
        return func(*args, **(kwargs or {}))
