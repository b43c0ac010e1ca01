"""The whole model against a slow float64 Transformer written from the papers, one sequence at a
time."""

import itertools
import math

import pytest
import torch

from wellposed.models import (
    WellposedConfig,
    WellposedForCausalLM,
    WellposedForSequenceClassification,
)

SIZES = {
    "vocab_size": 13,
    "max_position_embeddings": 12,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
}


class SlowTransformer:
    """Unpadded sequences only; so a padded batch must equal its rows by themselves."""

    def __init__(self, model):
        self.config = model.config
        self.weights = {
            name.removeprefix("model."): value.detach()
            for name, value in model.state_dict().items()
        }

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def layer_norm(self, x, scale, shift=0.0):
        centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
        return (
            centred / (centred.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt() * scale
            + shift
        )

    def embed(self, tokens):
        width = self.config.hidden_size
        rows = []
        for position, token in enumerate(tokens):
            if self.config.position == "learned":
                code = self.weights["embeddings.position.weight"][position] * math.sqrt(width)
            else:
                waves = [
                    (math.sin if c % 2 == 0 else math.cos)(
                        position / 10000 ** (2 * (c // 2) / width)
                    )
                    for c in range(width)
                ]
                code = torch.tensor(waves, dtype=torch.float64)
            rows.append(self.weights["embeddings.token.weight"][token] * math.sqrt(width) + code)
        return torch.stack(rows)

    def attend(self, path, x, is_causal):
        heads, dim = (
            self.config.num_attention_heads,
            self.config.hidden_size // self.config.num_attention_heads,
        )
        query, key, value = (self.linear(f"{path}.{name}_proj", x) for name in "qkv")
        joined = torch.zeros_like(x)
        for head in range(heads):
            columns = slice(head * dim, (head + 1) * dim)
            q, k, v = query[:, columns], key[:, columns], value[:, columns]
            if self.config.qk_norm:
                q = self.layer_norm(q, self.weights[f"{path}.q_norm.weight"])
                k = self.layer_norm(k, self.weights[f"{path}.k_norm.weight"])
            for i in range(len(x)):
                seen = i + 1 if is_causal else len(x)
                weights = (k[:seen] @ q[i] / math.sqrt(dim)).exp()
                joined[i, columns] = (weights / weights.sum()) @ v[:seen]
        return self.linear(f"{path}.o_proj", joined)

    def feed(self, path, x):
        hidden = self.linear(f"{path}.up_proj", x)
        if self.config.activation == "relu":
            hidden = hidden * (hidden > 0)
        else:
            hidden = hidden * 0.5 * (1 + torch.special.erf(hidden / math.sqrt(2)))
        return self.linear(f"{path}.down_proj", hidden)

    def half(self, path, x, branch):
        def norm(value):
            return self.layer_norm(
                value, self.weights[f"{path}_norm.weight"], self.weights[f"{path}_norm.bias"]
            )

        joined = branch(norm(x) if self.config.norm == "pre" else x)
        factor = self.weights[f"{path}_residual.scale"] if self.config.residual == "rezero" else 1.0
        return norm(x + factor * joined) if self.config.norm == "post" else x + factor * joined

    def hidden(self, tokens, is_causal):
        x = self.embed(tokens)
        for layer in range(self.config.num_hidden_layers):
            path = f"layers.{layer}"
            x = self.half(
                f"{path}.attention",
                x,
                lambda h, p=path: self.attend(f"{p}.attention", h, is_causal),
            )
            x = self.half(
                f"{path}.feedforward", x, lambda h, p=path: self.feed(f"{p}.feedforward", h)
            )
        if self.config.norm == "pre":
            x = self.layer_norm(
                x, self.weights["final_norm.weight"], self.weights["final_norm.bias"]
            )
        return x


def build(model_class, **changes):
    torch.manual_seed(0)
    model = model_class(WellposedConfig(**{**SIZES, **changes})).eval().double()
    for module in model.modules():
        if type(module).__name__ == "SinusoidalPositions":
            module.reset_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("_proj.weight", "token.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def padded(side):
    """Three sequences of different lengths in a batch, padding on one side, with their rows."""
    rows = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5]]
    ids, mask = torch.zeros(3, 8, dtype=torch.long), torch.zeros(3, 8, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(8 - len(row), 8)
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return rows, ids, mask


STRUCTURES = list(itertools.product(["post", "pre", "none"], ["plain", "rezero"], [False, True]))


@pytest.mark.parametrize(("norm", "residual", "qk_norm"), STRUCTURES)
def test_language_model_logits(norm, residual, qk_norm):
    model = build(
        WellposedForCausalLM, norm=norm, residual=residual, qk_norm=qk_norm, activation="relu"
    )
    slow = SlowTransformer(model)
    for side in ("left", "right"):
        rows, ids, mask = padded(side)
        logits = model(input_ids=ids, attention_mask=mask).logits
        for row, row_logits, row_mask in zip(rows, logits, mask, strict=True):
            expected = slow.hidden(row, is_causal=True) @ slow.weights["embeddings.token.weight"].T
            torch.testing.assert_close(
                row_logits[row_mask.bool()], expected, rtol=1e-10, atol=1e-10
            )


@pytest.mark.parametrize(
    ("pooling", "position"), [("mean", "sinusoidal"), ("first", "learned"), ("max", "learned")]
)
def test_classifier_logits(pooling, position):
    model = build(
        WellposedForSequenceClassification, pooling=pooling, position=position, num_labels=5
    )
    slow = SlowTransformer(model)
    pool = {
        "mean": lambda h: sum(h) / len(h),
        "first": lambda h: h[0],
        "max": lambda h: torch.stack(list(h)).amax(0),
    }
    for side in ("left", "right"):
        rows, ids, mask = padded(side)
        logits = model(input_ids=ids, attention_mask=mask).logits
        for row, row_logits in zip(rows, logits, strict=True):
            pooled = pool[pooling](slow.hidden(row, is_causal=False))
            torch.testing.assert_close(
                row_logits, slow.linear("classifier", pooled), rtol=1e-10, atol=1e-10
            )


def test_hidden_states_end_in_the_normed_state():
    model = build(WellposedForCausalLM, norm="pre")
    output = model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    slow = SlowTransformer(model)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(
        output.hidden_states[0][0], slow.embed([1, 2, 3]), rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(
        output.hidden_states[-1][0], slow.hidden([1, 2, 3], True), rtol=1e-10, atol=1e-10
    )


def test_the_loss_is_the_mean_cross_entropy_of_the_labels_that_count():
    model = build(WellposedForCausalLM)
    ids, labels = (
        torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        torch.tensor([[1, 2, -100, 4], [5, 6, -100, -100]]),
    )
    output = model(input_ids=ids, labels=labels)
    log_probabilities = output.logits.float().log_softmax(-1)
    terms = [-log_probabilities[b, i - 1, labels[b, i]] for b, i in [(0, 1), (0, 3), (1, 1)]]
    torch.testing.assert_close(output.loss, sum(terms) / 3, rtol=1e-6, atol=0)
    summed = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(6)).loss
    torch.testing.assert_close(summed, sum(terms) / 6, rtol=1e-6, atol=0)
    kept = model(input_ids=ids, labels=labels, logits_to_keep=3)
    # Products of other shapes may be summed in another order: the last digit of float64 is not the
    # same on every CPU.
    torch.testing.assert_close(kept.logits, output.logits[:, 1:], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(kept.loss, terms[1], rtol=1e-6, atol=0)
    some = model(input_ids=ids, logits_to_keep=torch.tensor([0, 2]))
    torch.testing.assert_close(some.logits, output.logits[:, [0, 2]], rtol=1e-13, atol=1e-14)
