"""The set of weights whose vectors along the width of a token have one length, as in nGPT."""

from __future__ import annotations

from dataclasses import dataclass

from wellposed.constrain._options import SetOptions
from wellposed.constrain._set import SETS, MatrixSet
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.constrain.sets._columns import Columns
from wellposed.constrain.sets._rows import Rows

_READ_TOKENS = frozenset({"query", "key", "value", "feedforward_in", "feedforward_gate"})
_WRITE_TOKENS = frozenset({"output", "feedforward_out"})


@SETS.register("hypersphere")
@dataclass(frozen=True)
class Hypersphere(MatrixSet):
    """Vectors along the width of a token of length ``size``: `Rows` or `Columns`, by role.

    Rows of query, key, value, up and gate weights, which read tokens; columns of output and down
    weights, which write them; the vectors of embeddings. Up to rounding; nothing is claimed of
    ``|W|_2``. Source: nGPT (Loshchilov et al. 2025, arXiv 2410.01131), sec. 2.6. For an output layer
    that is not tied to the embedding, use ``to="rows"``.
    """

    @classmethod
    def refusal(
        cls, weight_slice: WeightSlice, options: SetOptions, *, is_table: bool
    ) -> str | None:
        """Refuse weights of which no role tells the side of the tokens."""
        del options
        roles = weight_slice.roles
        if is_table or (roles and (roles <= _READ_TOKENS or roles <= _WRITE_TOKENS)):
            return None
        listed_roles = ", ".join(sorted(roles)) or "none"
        return (
            f"no known side along the width of a token (roles: {listed_roles}); use to='rows' if it reads"
            " tokens, to='columns' if it writes them"
        )

    @classmethod
    def chosen(cls, weight_slice: WeightSlice, options: SetOptions, *, is_table: bool) -> MatrixSet:
        """Return rows or columns; vectors of an embedding are its columns."""
        reads = not is_table and weight_slice.roles <= _READ_TOKENS
        kind = Rows if reads else Columns
        return kind.chosen(weight_slice, options, is_table=is_table)
