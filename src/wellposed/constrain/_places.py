"""Names under which a model has its constrained parameters, compared with the live model at each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from wellposed.constrain._weight import Weight
from wellposed.errors import ConfigError, listed


@dataclass(frozen=True, eq=False)
class _Place:
    """One name of a constrained parameter, and the module that owned it at the start."""

    path: str
    name: str
    module: nn.Module
    parameter: nn.Parameter

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    def is_in(self, module: nn.Module | None) -> bool:
        return module is not None and module._parameters.get(self.name) is self.parameter


class HeldPlaces:
    """Every name of every constrained parameter, those of tied ones too."""

    def __init__(self, model: nn.Module, weights: Iterable[Weight]) -> None:
        held = {id(place.parameter) for weight in weights for place in weight.held}
        self._model = model
        self._places = [
            _Place(path, name, module, parameter)
            for path, module in model.named_modules(remove_duplicate=False)
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in held
        ]

    def check(self) -> None:
        """Raise for names under which the model has another parameter, or none.

        A module that was wrapped keeps its parameters, and is known by its new path from then on.
        """
        moved = [place for place in self._places if not place.is_in(self._at(place.path))]
        if not moved:
            return
        paths = {id(module): path for path, module in self._model.named_modules()}
        gone: list[str] = []
        for place in moved:
            path, successor = paths.get(id(place.module)), self._at(place.path)
            is_taken = successor is not None and successor._parameters.get(place.name) is not None
            if path is None or is_taken or not place.is_in(place.module):
                gone.append(place.label)
            else:
                self._places[self._places.index(place)] = replace(place, path=path)
        if gone:
            raise ConfigError(
                "constrain_: the model no longer has these constrained weights where they were: an"
                " assignment, load_state_dict(assign=True), untying or a new module put others there,"
                " which the constraint does not see. Undo it, or call remove(), build the optimizer"
                f" and call constrain_ again:\n{listed(gone)}"
            )

    def _at(self, path: str) -> nn.Module | None:
        module: nn.Module | None = self._model
        for key in path.split(".") if path else ():
            module = module._modules.get(key) if module is not None else None
        return module
