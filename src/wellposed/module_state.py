"""Store the tensors of modules that are no parameters, and put them back as they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wellposed.errors import is_about_resources

_SCALARS = (bool, int, float, str, type(None))


class StoredTensor:
    """One tensor of a module's table: the object, its memory, its shape and its values.

    Status: restores bit for bit, also after ``resize_``, ``tensor.data = other`` or another tensor
    of the same name. Cost: a copy of the tensor.
    """

    def __init__(self, table: dict[str, Any], name: str, tensor: Tensor) -> None:
        self.table = table
        self.name = name
        self.tensor = tensor
        self._alias = tensor.detach()  # keeps the memory, whatever the tensor is set to
        self._value = self._alias.clone()
        self._bytes = _storage_bytes(self._alias)
        self._version = _version(tensor)

    def copy(self) -> Tensor:
        """Return a copy of the stored values."""
        return self._value.clone()

    def is_changed(self) -> bool:
        """Return whether the tensor was written to, resized or replaced; reads no value."""
        is_there = self.table.get(self.name) is self.tensor
        is_written = _version(self.tensor) != self._version
        return not is_there or is_written or not _same_memory(self.tensor, self._alias)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the tensor back into its table, with its memory, shape and values."""
        self.table[self.name] = self.tensor
        if self._bytes is not None and self._alias.untyped_storage().nbytes() != self._bytes:
            self._alias.untyped_storage().resize_(self._bytes)
        if not _same_memory(self.tensor, self._alias):
            self.tensor.data = self._alias
        if not torch.equal(self.tensor, self._value):  # untouched ones may be part of a graph
            self.tensor.copy_(self._value)


class _Part:
    """Names and tensors of one module, and the plain values beside them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buffers = dict(module._buffers)
        self.not_saved = set(module._non_persistent_buffers_set)
        self.tensors = plain_tensors(module)
        self.scalars = {n: v for n, v in vars(module).items() if isinstance(v, _SCALARS)}

    def is_changed(self) -> bool:
        return self._has_other_buffers() or (
            plain_tensors(self.module).keys() != self.tensors.keys()
        )

    def _has_other_buffers(self) -> bool:
        table = self.module._buffers
        is_same = [*table.keys()] == [*self.buffers]
        return not (is_same and all(table[name] is value for name, value in self.buffers.items()))

    def restore(self) -> None:
        module = self.module
        table = module._buffers
        new_tensors = plain_tensors(module).keys() - self.tensors.keys()
        is_new = bool(new_tensors or table.keys() - self.buffers.keys())
        if self._has_other_buffers():
            table.clear()
            table.update(self.buffers)
        if module._non_persistent_buffers_set != self.not_saved:
            module._non_persistent_buffers_set = set(self.not_saved)

        for name in new_tensors:
            del vars(module)[name]
        vars(module).update(self.tensors)
        if is_new:
            # A flag such as "is built" belongs to the tensors that were made with it.
            vars(module).update(self.scalars)


class ModuleTables:
    """Names and objects of the buffers and plain tensors of modules, to be put back by `restore`.

    Buffers and tensors that appear later are removed, with the flags of their module. Parameters,
    modules and other Python objects, such as counters and lists, are not part of it.

    Args:
        modules: Modules, without their children.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._parts = [_Part(module) for module in modules]

    @torch.no_grad()
    def lend_copies(self) -> None:
        """Put fresh copies in place of all tensors, so that a pass writes to the copies."""
        self.restore_tables()
        for table, values in self._tables():
            for name, tensor in values.items():
                if _is_stored(tensor):
                    table[name] = tensor.detach().clone()

    def restore_tables(self) -> None:
        """Put the objects back under their names, without a look at their values."""
        for part in self._parts:
            part.restore()

    def _tables(self) -> Iterable[tuple[dict[str, Any], Mapping[str, Any]]]:
        for part in self._parts:
            yield part.module._buffers, part.buffers
            yield vars(part.module), part.tensors


class ModuleState(ModuleTables):
    """`ModuleTables` that keeps the values as well; `restore` may be called as often as needed.

    Args:
        modules: Modules, without their children.
        parameters: Tables of parameters that are restored, too.

    Cost: a copy of every buffer and plain tensor.
    """

    def __init__(
        self, modules: Iterable[nn.Module], parameters: Iterable[dict[str, Any]] = ()
    ) -> None:
        super().__init__(modules)
        tables = [*self._tables(), *((table, dict(table)) for table in parameters)]
        self._stored = [
            StoredTensor(table, name, tensor)
            for table, values in tables
            for name, tensor in values.items()
            if _is_stored(tensor)
        ]

    def lend_copies(self) -> None:
        """Put fresh copies of the stored values in place of all tensors."""
        self.restore_tables()
        for entry in self._stored:
            entry.table[entry.name] = entry.copy()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors themselves."""
        return tuple(entry.tensor for entry in self._stored)

    def is_changed(self) -> bool:
        """Return whether a tensor was written to, resized, replaced or added; reads no value."""
        return any(entry.is_changed() for entry in (*self._parts, *self._stored))

    def restore(self) -> None:
        """Put everything back; an error in one tensor does not keep the others from it.

        Of several errors one about memory is raised, else the first.
        """
        problems: list[Exception] = []
        for entry in (*self._parts, *self._stored):
            try:
                entry.restore()
            except Exception as error:
                problems.append(error)
        if problems:
            raise next(filter(is_about_resources, problems), problems[0])


def plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return tensors that are neither parameters nor buffers, such as a weight set by a hook."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


def _is_stored(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.is_meta or is_lazy(value))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _storage_bytes(tensor: Tensor) -> int | None:
    """Return the size of a tensor's memory; None for kinds that have none of their own."""
    return tensor.untyped_storage().nbytes() if _is_dense(tensor) else None


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _same_memory(tensor: Tensor, alias: Tensor) -> bool:
    if (tensor.shape, tensor.dtype, tensor.device) != (alias.shape, alias.dtype, alias.device):
        return False
    return tensor.is_set_to(alias) if _is_dense(tensor) and _is_dense(alias) else True
