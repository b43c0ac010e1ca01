"""How many parameters a TransJect classifier has."""

from __future__ import annotations


def transject_parameter_count(
    vocab_size: int,
    embed_dim: int,
    num_layers: int,
    num_experts: int,
    *,
    num_outputs: int = 1,
    released: bool = False,
) -> int:
    """Return the number of parameters of a TransJect classifier with sinusoidal positions and a
    linear head with bias.

    Exact, d = embed_dim: ours is
    `L (2 E d^2 + 2 d^2 + [E > 1] d + 1) + d^2 + V d/2 + outputs (d + 1)`. With `released` that of
    the code of Sengupta et al. (2023), whose maps have biases and whose gate (with one) is there
    for one expert
    too: `L (E (2 d^2 + 2 d) + d + 1 + 2 d^2 + 2 d) + L + d^2 + d + V d/2 + outputs (d + 1)`. Their
    Table 5 prints ten times these. With a learnt spectrum, d takes the place of `d^2`.

    >>> [transject_parameter_count(187, 512, 6, e, released=True) for e in (1, 4, 8)]
    [6617869, 16073485, 28680973]
    >>> transject_parameter_count(187, 512, 6, 4)
    16042247
    """
    square = embed_dim * embed_dim
    ends = vocab_size * embed_dim // 2 + num_outputs * (embed_dim + 1) + square
    if released:
        biased = square + embed_dim
        return (
            num_layers * (2 * num_experts * biased + 2 * biased + embed_dim + 2) + ends + embed_dim
        )
    gate = embed_dim if num_experts > 1 else 0
    return num_layers * (2 * num_experts * square + 2 * square + gate + 1) + ends
