"""The penalty equals the papers' formulas, re-computed in float64 from weights and affinities read
by hand."""

import pytest
import torch
from tests.support.penalized import after_forward

from wellposed.models import build_model
from wellposed.penalize import OrthogonalityPenalty
from wellposed.presets import mcgrath2024, zhang2021

WIDTH = 16
HEADS = 4
LAYERS = 2
LENGTHS = (9, 6, 1)
STRENGTHS = {"affinity": 0.3, "attention": 0.7, "feedforward": 1.1}
KINDS = ("sequence_classification", "causal_lm")
ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
NAMES = {
    **{role: f"model.layers.{{}}.attention.{name}" for role, name in ATTENTION.items()},
    **{role: f"model.layers.{{}}.feedforward.{role}_proj" for role in ("up", "down")},
}


def gram_distance(matrix):
    """|M^T M - I|_F^2, the slow way."""
    matrix = matrix.double()
    return ((matrix.T @ matrix - torch.eye(matrix.shape[1], dtype=torch.float64)) ** 2).sum()


class Reference:
    """Weights by literal name, and affinities from queries and keys caught by hooks on the linear
    layers."""

    def __init__(self, model, *, causal):
        self.model = model
        self.causal = causal
        self.projected = {}
        for layer in range(LAYERS):
            for role in ("query", "key"):
                path = NAMES[role].format(layer)
                model.get_submodule(path).register_forward_hook(self._keep(path))

    def _keep(self, path):
        def hook(module, args, output):
            self.projected[path] = output.detach().double()

        return hook

    def weight(self, role, layer):
        return self.model.get_submodule(NAMES[role].format(layer)).weight.detach().double()

    def affinities(self, layer):
        """Yield A of every sequence and head, padded rows and columns cut off before the
        softmax."""
        query, key = (self.projected[NAMES[role].format(layer)] for role in ("query", "key"))
        size = WIDTH // HEADS
        for sequence, length in enumerate(LENGTHS):
            for head in range(HEADS):
                part = slice(head * size, (head + 1) * size)
                scores = query[sequence, :length, part] @ key[sequence, :length, part].T / size**0.5
                if self.causal:
                    later = torch.ones(length, length).triu(1).bool()
                    scores = scores.masked_fill(later, -torch.inf)
                yield scores.softmax(-1)

    def total(self):
        total = 0.0
        for layer in range(LAYERS):
            affinity = sum(map(gram_distance, self.affinities(layer))) / len(LENGTHS)
            stacked = torch.cat([self.weight(role, layer) for role in ATTENTION])
            feedforward = sum(gram_distance(self.weight(role, layer)) for role in ("up", "down"))
            parts = affinity, gram_distance(stacked), feedforward
            total += sum(s * float(part) for s, part in zip(STRENGTHS.values(), parts, strict=True))
        return total


def build(kind=KINDS[0]):
    model = build_model(
        "wellposed", kind, vocab_size=30, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=24, max_position_embeddings=16, norm="post",
    ).double()  # fmt: skip
    return model, Reference(model, causal=kind == "causal_lm")


def inputs():
    tokens = torch.randint(1, 30, (len(LENGTHS), max(LENGTHS)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_equals_the_papers_formulas_with_padding(kind, dtype, tolerance):
    model, reference = build(kind)
    model = model.to(dtype).train()
    penalty = OrthogonalityPenalty(model, **STRENGTHS)
    value = after_forward(model, penalty, inputs())
    assert value.item() == pytest.approx(reference.total(), rel=tolerance)
    assert sum(penalty.terms().values()) == pytest.approx(value.item(), rel=1e-6)


def test_presets_are_the_papers_terms():
    model, reference = build()
    penalty = OrthogonalityPenalty(model, **zhang2021("III", 0.5, as_printed=True))
    after_forward(model, penalty, inputs())
    terms = penalty.terms()
    printed = gram_distance(reference.weight("down", 1)).sqrt() * 0.5
    assert terms["feedforward.encoder.1.down"] == pytest.approx(printed.item(), rel=1e-12)
    assert set(OrthogonalityPenalty(model, **zhang2021("I", 1.0))._strengths) == {"affinity"}

    keys = OrthogonalityPenalty(model, **mcgrath2024(strength=0.1))
    keys()
    expected = 0.1 * gram_distance(reference.weight("key", 0).T).sqrt()
    assert keys.terms()["key.encoder.0"] == pytest.approx(expected.item(), rel=1e-12)
    assert set(keys.terms()) == {"key.encoder.0", "key.encoder.1"}


def test_embedding_penalises_rows_of_the_table():
    model, _ = build()
    penalty = OrthogonalityPenalty(model, embedding=2.0, form="gram")
    table = model.model.embeddings.token.weight.detach()
    assert penalty().item() == pytest.approx(2 * gram_distance(table.T).sqrt().item(), rel=1e-12)


def test_separate_asks_it_of_each_matrix():
    model, reference = build()
    penalty = OrthogonalityPenalty(model, attention=1.0, attention_mode="separate")
    weights = (reference.weight(role, layer) for layer in range(2) for role in ATTENTION)
    expected = sum(gram_distance(weight) for weight in weights)
    assert penalty().item() == pytest.approx(float(expected), rel=1e-12)
