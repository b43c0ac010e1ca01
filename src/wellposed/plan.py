"""Cost of a step of a verb, in advance: matrices, ranks, products, collectives, memory."""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from wellposed.linalg import is_sharded
from wellposed.text_table import text_table

TOKENS = 4096
"""Default number of tokens that each rank reads in a step."""
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
# Bytes that each rank sends, as multiples of its input.
_SENT = {"all_gather": 1, "all_reduce": 2, "all_to_all": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Plan:
    """Cost of one step of a verb; ``print(plan.summary())``.

    Status: collectives are those of the step. FLOPs count matrix products, bytes and memory the buffers of the verb, on
    the path of accelerators. Time is not planned: verbs multiply in float32, models often in
    bfloat16.
    """

    verb: str
    matrices: Mapping[tuple[str, tuple[int, ...], str], int]
    """Number of matrices of each role, shape and dtype."""
    flops_by_rank: tuple[int, ...]
    model_flops_per_token: int
    """6 times the parameters per token, of experts only the active ones."""
    matrices_by_rank: tuple[int, ...] = ()
    """Number of matrices per rank; empty if each rank works on its shard of all."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    """Bytes that a rank sends to others."""
    kept_bytes: int = 0
    """Memory of the busiest rank between steps."""
    peak_bytes: int = 0
    """Additional memory within a step."""
    notes: tuple[str, ...] = ()

    @property
    def balance(self) -> float:
        """FLOPs of the busiest rank over the mean of all."""
        total = sum(self.flops_by_rank)
        return max(self.flops_by_rank) * len(self.flops_by_rank) / total if total else 1.0

    def share(self, tokens: int = TOKENS) -> float:
        """Return FLOPs of the busiest rank over those of the model on its ``tokens``."""
        return max(self.flops_by_rank) / (self.model_flops_per_token * tokens)

    def summary(self, tokens: int = TOKENS) -> str:
        """Return the plan as text, relative to the model's FLOPs on ``tokens``."""
        kinds = [(role, " x ".join(map(str, shape)), kind) for role, shape, kind in self.matrices]
        rows = [(*kind, str(n)) for kind, n in zip(kinds, self.matrices.values(), strict=True)]
        title = (
            f"{self.verb}: {sum(self.matrices.values())} matrices, {len(self.flops_by_rank)} ranks"
        )
        calls = ", ".join(f"{count} {name}" for name, count in self.collectives.items())
        flops = in_units(max(self.flops_by_rank))
        sent = in_units(self.sent_bytes)
        stored = in_units(self.kept_bytes)
        more = in_units(self.peak_bytes)
        lines = (
            text_table(title, ["role", "shape", "dtype", "count"], rows),
            f"a step of the busiest rank: {flops}FLOP, {100 * self.share(tokens):.2g}% of the"
            f" model's on {tokens} tokens; balance {self.balance:.2f}",
            f"sends {sent}B in {calls or '0 collectives'};"
            f" memory {stored}B between steps, {more}B more within one",
        )
        shares = sorted(Counter(self.matrices_by_rank).items())
        counts = (f"{count} matrices on each of {ranks} ranks" for count, ranks in shares)

        return "\n".join((*lines, *counts, *self.notes))

    def show(self) -> Self:
        """Print the summary, and return the plan."""
        sys.stdout.write(f"{self.summary()}\n")
        return self


def in_units(number: float) -> str:
    """Return a number with three digits and a decimal prefix, such as ``1.23 M``."""
    power = min(int(math.log10(number) / 3), 6) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {' kMGTPE'[power].strip()}"


def counted_kinds(
    matrices: Iterable[tuple[str, Sequence[int], torch.dtype]],
) -> dict[tuple[str, tuple[int, ...], str], int]:
    """Return the number of matrices of each role, shape and dtype."""
    return dict(Counter((role, tuple(shape), str(dtype)[6:]) for role, shape, dtype in matrices))


def model_flops_per_token(model: nn.Module) -> int:
    """Return 6 times the number of parameters per token (one forward, two backward products).

    Of modules named ``experts``, the fraction in the model's configuration counts. Products of
    queries and keys are left out.

    >>> model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.Linear(8, 9, bias=False)})})
    >>> model.config = type("Config", (), {"num_local_experts": 4, "num_experts_per_tok": 2})
    >>> model_flops_per_token(model)  # of half of 72 parameters
    216
    """
    config = getattr(model, "config", None)
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 1)
    active = getattr(config, "num_experts_per_tok", None) or experts
    sizes = ((name, weight.numel()) for name, weight in model.named_parameters())
    return 6 * sum(n * active // experts if ".experts." in name else n for name, n in sizes)


def ranks_of(tensors: Iterable[Tensor]) -> int:
    """Return the number of ranks that tensors are sharded over, 1 if none is."""
    sharded = (shard for shard in tensors if is_sharded(shard))
    axes = ((shard.device_mesh, *pair) for shard in sharded for pair in enumerate(shard.placements))
    return max(
        (mesh.size(axis) for mesh, axis, placement in axes if not placement.is_replicate()),
        default=1,
    )


def counted_plan(
    verb: str,
    model: nn.Module,
    matrices: Iterable[tuple[str, Sequence[int], torch.dtype]],
    run: Callable[[], object],
    *notes: str,
) -> Plan:
    """Return the plan of ``run``, by running it with weights on the meta device, sharded."""
    from unittest.mock import patch  # rarely needed

    empty: dict[str, Tensor] = {
        f"model.{name}": nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        for name, weight in model.named_parameters()
    }
    for weight in empty.values():
        if weight.requires_grad:  # its gradient is already allocated
            weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
    caller: Any = nn.Module()
    caller.model = model
    caller.forward = run
    ranks = ranks_of(model.parameters())
    with patch.object(torch, "autocast", _Autocast), Meter(ranks) as meter:
        functional_call(caller, empty, ())
    per_token = model_flops_per_token(model)
    return Plan(
        verb,
        counted_kinds(matrices),
        flops_by_rank=(meter.flops,) * ranks,
        model_flops_per_token=per_token,
        collectives=dict(meter.collectives),
        sent_bytes=round(meter.sent_bytes),
        peak_bytes=meter.peak_bytes,
        notes=notes,
    )


class Meter(TorchDispatchMode):
    """Add up products, collectives and memory of the operations on one of ``ranks``."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.flops = self.bytes = self.peak_bytes = 0
        self.sent_bytes = 0.0
        self.collectives: Counter[str] = Counter()
        self._ranks = ranks
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # operations on its shard arrive here
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for leaf in inputs:
            self._is_new(leaf)

        result = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        products = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))
        if products:
            self.flops += products(*args, **kwargs, out_val=result)

        is_collective = func.namespace in ("c10d", "_c10d_functional")  # or waits for a collective
        for kind in _SENT if is_collective else ():
            if kind.replace("_", "") in name.replace("_", ""):
                self.collectives[kind] += 1
                times = self._ranks if kind == "all_gather" else _SENT[kind]
                self.sent_bytes += times * inputs[-1].nbytes * (self._ranks - 1) / self._ranks

        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and self._is_new(leaf):
                storage = leaf.untyped_storage()
                self._allocate(storage.nbytes())
                weakref.finalize(storage, self._allocate, -storage.nbytes())
        return result

    def _is_new(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        is_new = storage._cdata not in self._seen
        if is_new:
            self._seen.add(storage._cdata)
            weakref.finalize(storage, self._seen.discard, storage._cdata)
        return is_new

    def _allocate(self, size: int) -> None:
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


class _Autocast(torch.autocast):
    """Autocast that also works on the meta device."""

    def __init__(self, device_type: str, *args: Any, **keywords: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **keywords)
