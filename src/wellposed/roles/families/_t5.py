"""T5: ``SelfAttention`` and ``EncDecAttention`` with ``q, k, v, o``, and a plain or gated
``DenseReluDense``."""

from wellposed.roles.families._family import (
    FAMILIES,
    Family,
    attention_named,
    feedforward_named,
    first_of,
)

FAMILIES.register("t5")(
    Family(
        attention_named("q", "k", "v", "o"),
        # gelu(wi_0 x) * (wi_1 x): the factor inside the activation is the gate, as in Llama's
        # gate_proj
        first_of(
            feedforward_named(up="wi_1", down="wo", gate="wi_0"), feedforward_named("wi", "wo")
        ),
    )
)
