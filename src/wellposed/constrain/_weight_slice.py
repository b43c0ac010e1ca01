"""`WeightSlice`: a matrix of a model, as its layer applies it; all of them in a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from wellposed.roles import WeightView, is_called, is_stored, layer_deviation, sources_of

# Adapters (such as LoRA) keep the layer that they adapt under this name.
_BASE = "base_layer"


@dataclass(frozen=True)
class WeightSlice:
    """A matrix of the model, or a weight that would be one if it were a plain parameter."""

    module_path: str
    name: str
    module: nn.Module
    parameter: nn.Parameter | None
    """None if the module computes its weight (parametrised or packed): nothing to constrain."""
    expert: int | None = None
    """Index in a stack, such as that of an expert; None if the parameter is a matrix."""
    rows: range | None = None
    """The output rows of one part of a fused weight, or None for all rows."""
    transposed: bool = False
    """Whether the parameter is stored (in, out) and read as (out, in)."""
    roles: frozenset[str] = frozenset()
    scattered: bool = False
    """Whether rows of roles interleave, so that this is all of them."""
    padding: int | None = None
    """The column of a padding vector, which may be zero."""
    also: tuple[str, ...] = ()
    """Other names of the same tied parameter."""
    deviation: str | None = None
    """The layer that computes something else than this weight, and why; None if none does."""

    @property
    def parameter_name(self) -> str:
        """The full dotted name, as in ``state_dict``."""
        return f"{self.module_path}.{self.name}" if self.module_path else self.name

    @property
    def label(self) -> str:
        """The parameter's name, with the rows if the matrix is a part of it."""
        expert = "" if self.expert is None else f"[{self.expert}]"
        if self.rows is None:
            return f"{self.parameter_name}{expert}"
        step = f":{self.rows.step}" if self.rows.step > 1 else ""
        return f"{self.parameter_name}{expert}[{self.rows.start}:{self.rows.stop}{step}]"

    def matrix_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the matrix inside a tensor of the parameter's shape: a view."""
        matrix = tensor if self.expert is None else tensor[self.expert]
        oriented = matrix.mT if self.transposed else matrix
        if self.rows is None:
            return oriented
        return oriented[self.rows.start : self.rows.stop : self.rows.step]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix; of a weight in shards, of the whole."""
        assert self.parameter is not None
        rows, columns = self.parameter.shape[-2:]
        if self.transposed:
            rows, columns = columns, rows
        return (rows if self.rows is None else len(self.rows)), columns

    @property
    def part(self) -> tuple[int, ...]:
        """Entry of a stack and first row; empty for a whole parameter."""
        rows = () if self.rows is None else (self.rows.start,)
        return rows if self.expert is None else (self.expert, *rows)

    def overlaps(self, other: WeightSlice) -> bool:
        """Whether two matrices have numbers in common."""
        if self.parameter is not other.parameter or self.expert != other.expert:
            return False
        mine = self.rows
        others = other.rows
        return mine is None or others is None or not set(mine).isdisjoint(others)

    @property
    def layer_path(self) -> str:
        """The path of the layer without its adapter."""
        return self.module_path.removesuffix(f".{_BASE}")

    @property
    def is_adapted(self) -> bool:
        """Whether the weight is the frozen one below an adapter."""
        return self.module_path.endswith(f".{_BASE}")

    @property
    def is_main_weight(self) -> bool:
        """Whether the module's path means this weight."""
        others = "weight" not in self.module._parameters and self.name.endswith("weight")
        return self.name == "weight" or others


def all_candidates(model: nn.Module) -> Iterator[WeightSlice]:
    """Yield every parameter of the model under each of its names, and every computed weight."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList):
            continue
        computed = sources_of(module)
        hidden = {name for names in computed.values() for name in names}
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in hidden:
                view = WeightView(path, module, name)
                is_applied = name == "weight" and is_called(model, path)
                differs = layer_deviation(view) if is_applied else None
                text = None if differs is None else differs.text
                stored = name != "weight" or is_stored(view)
                matrix = parameter if stored else None
                yield WeightSlice(path, name, module, matrix, deviation=text)
        is_packed = "weight" not in computed and callable(getattr(module, "weight", None))
        for name in (*computed, *(["weight"] if is_packed else [])):
            yield WeightSlice(path, name, module, None)


def has_empty_weights(slices: Iterable[WeightSlice]) -> bool:
    """Whether a weight is on the meta device, so that it has no values."""
    parameters = (weight_slice.parameter for weight_slice in slices)
    return any(parameter is not None and parameter.is_meta for parameter in parameters)
