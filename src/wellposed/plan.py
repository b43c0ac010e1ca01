"""What a step of a verb costs, before it is taken: matrices, ranks, products, collectives, memory."""

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
"""Tokens that each rank reads in a step, if a plan is not asked for others."""
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
# What each rank sends, in parts of its input.
_SENT = {"all_gather": 1, "all_reduce": 2, "all_to_all": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Plan:
    """Cost of one step of a verb; ``print(plan.summary())``.

    Status: collectives are those of the step. FLOPs count matrix products, bytes and memory the
    buffers of the verb, for the way that accelerators take. Time is not planned: products of the
    verbs are in float32, those of a model often in bfloat16.
    """

    verb: str
    matrices: Mapping[tuple[str, tuple[int, ...], str], int]
    """How many there are of each role, shape and dtype."""
    flops_by_rank: tuple[int, ...]
    model_flops_per_token: int
    """6 times the parameters that meet a token, of experts those that it is sent to."""
    matrices_by_rank: tuple[int, ...] = ()
    """How many matrices each rank works on; empty if each works on its part of all."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    """What a rank sends to others."""
    kept_bytes: int = 0
    """Memory of the busiest rank between steps."""
    peak_bytes: int = 0
    """Further memory within a step."""
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
        """Return the plan as text.

        >>> print(Plan("constrain_", {("query", (64, 64), "float32"): 2}, (4096,), 100).summary(512))
        constrain_: 2 matrices, 1 ranks
        role     shape    dtype  count
        -----  -------  -------  -----
        query  64 x 64  float32      2
        a step of the busiest rank: 4.1 kFLOP, 8% of the model's on 512 tokens; balance 1.00
        sends 0 B in 0 collectives; memory 0 B between steps, 0 B more within one
        """
        kinds = [(role, " x ".join(map(str, shape)), kind) for role, shape, kind in self.matrices]
        rows = [(*kind, str(n)) for kind, n in zip(kinds, self.matrices.values(), strict=True)]
        title = (
            f"{self.verb}: {sum(self.matrices.values())} matrices, {len(self.flops_by_rank)} ranks"
        )
        calls = ", ".join(f"{count} {name}" for name, count in self.collectives.items())
        flops, sent = in_units(max(self.flops_by_rank)), in_units(self.sent_bytes)
        kept, more = in_units(self.kept_bytes), in_units(self.peak_bytes)
        lines = (
            text_table(title, ["role", "shape", "dtype", "count"], rows),
            f"a step of the busiest rank: {flops}FLOP, {100 * self.share(tokens):.2g}% of the"
            f" model's on {tokens} tokens; balance {self.balance:.2f}",
            f"sends {sent}B in {calls or '0 collectives'};"
            f" memory {kept}B between steps, {more}B more within one",
        )
        shares = sorted(Counter(self.matrices_by_rank).items())
        shown = (f"{count} matrices on each of {ranks} ranks" for count, ranks in shares)
        return "\n".join((*lines, *shown, *self.notes))

    def show(self) -> Self:
        """Print the summary, and return the plan."""
        sys.stdout.write(f"{self.summary()}\n")
        return self


def in_units(number: float) -> str:
    """Return a number to three digits with its decimal prefix.

    >>> [in_units(number) for number in (0, 999, 1_234_567, 2.5e15)]
    ['0 ', '999 ', '1.23 M', '2.5 P']
    """
    power = min(int(math.log10(number) / 3), 6) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {' kMGTPE'[power].strip()}"


def counted_kinds(
    matrices: Iterable[tuple[str, Sequence[int], torch.dtype]],
) -> dict[tuple[str, tuple[int, ...], str], int]:
    """Return how many matrices there are of each role, shape and dtype."""
    return dict(Counter((role, tuple(shape), str(dtype)[6:]) for role, shape, dtype in matrices))


def model_flops_per_token(model: nn.Module) -> int:
    """Return 6 times the number of parameters that meet a token: a product forward and two backward.

    Of the parameters below modules named ``experts`` a token meets the part that the model's
    configuration says. Products of queries and keys are left out.

    >>> from types import SimpleNamespace
    >>> layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    >>> model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": layers})})
    >>> model.config = SimpleNamespace(num_local_experts=4, num_experts_per_tok=2)
    >>> model_flops_per_token(model)  # of 2 layers with 72 parameters each
    864
    """
    config = getattr(model, "config", None)
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 1)
    active = getattr(config, "num_experts_per_tok", None) or experts
    sizes = ((name, weight.numel()) for name, weight in model.named_parameters())
    return 6 * sum(n * active // experts if ".experts." in name else n for name, n in sizes)


def ranks_of(tensors: Iterable[Tensor]) -> int:
    """Return over how many ranks tensors are sharded, 1 if none is."""
    sharded = (each for each in tensors if is_sharded(each))
    axes = ((each.device_mesh, *pair) for each in sharded for pair in enumerate(each.placements))
    return max(
        (mesh.size(axis) for mesh, axis, place in axes if not place.is_replicate()), default=1
    )


def counted_plan(
    verb: str,
    model: nn.Module,
    matrices: Iterable[tuple[str, Sequence[int], torch.dtype]],
    run: Callable[[], object],
    *notes: str,
) -> Plan:
    """Return the plan of what ``run`` does, by running it while the model's weights are on the meta
    device, sharded as they are: products cost nothing there, and collectives send nothing."""
    from unittest.mock import patch  # which few need

    empty: dict[str, Tensor] = {
        f"model.{name}": nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        for name, weight in model.named_parameters()
    }
    for weight in empty.values():
        if weight.requires_grad:  # its gradient has its place already
            weight.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", None))
    caller: Any = nn.Module()
    caller.model, caller.forward = model, run
    ranks = ranks_of(model.parameters())
    with patch.object(torch, "autocast", _Autocast), Meter(ranks) as meter:
        functional_call(caller, empty, ())
    per_token, flops = model_flops_per_token(model), (meter.flops,) * ranks
    cost = dict(meter.collectives), round(meter.sent_bytes), 0, meter.peak_bytes
    return Plan(verb, counted_kinds(matrices), flops, per_token, (), *cost, notes)


class Meter(TorchDispatchMode):
    """Add up products, collectives and memory of the operations on one of ``ranks``."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.flops = self.bytes = self.peak_bytes = 0
        self.sent_bytes = 0.0
        self.collectives: Counter[str] = Counter()
        self._ranks = ranks
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # the operations on its shard come here
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for leaf in given:
            self._is_new(leaf)
        result = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if products := flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None)):
            self.flops += products(*args, **kwargs, out_val=result)
        is_collective = func.namespace in ("c10d", "_c10d_functional")  # or waits for one
        for kind in _SENT if is_collective else ():
            if kind.replace("_", "") in name.replace("_", ""):
                self.collectives[kind] += 1
                times = self._ranks if kind == "all_gather" else _SENT[kind]
                self.sent_bytes += times * given[-1].nbytes * (self._ranks - 1) / self._ranks
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and self._is_new(leaf):
                storage = leaf.untyped_storage()
                self._allocate(storage.nbytes())
                weakref.finalize(storage, self._allocate, -storage.nbytes())
        return result

    def _is_new(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        if is_new := storage._cdata not in self._known:
            self._known.add(storage._cdata)
            weakref.finalize(storage, self._known.discard, storage._cdata)
        return is_new

    def _allocate(self, size: int) -> None:
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


class _Autocast(torch.autocast):
    """Autocast, of which the meta device has none."""

    def __init__(self, device_type: str, *args: Any, **keywords: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **keywords)
