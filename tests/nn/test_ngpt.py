"""nGPT against a slow float64 Transformer from the paper, one head and one query at a time; its refusals."""

import copy
import math
from typing import Any

import pytest
import torch
from tests.support.close import within
from tests.support.slow_transformer import padded
from tests.support.tiny import tiny
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import wellposed as wp
from wellposed import nn as wn
from wellposed.errors import ConfigError, ShapeError
from wellposed.models import (
    WellposedConfig,
    WellposedForCausalLM,
    WellposedForSeq2SeqLM,
    WellposedModel,
)
from wellposed.presets import ngpt

PARTS = {**ngpt(), "intermediate_size": 20}
ROWS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5]]
UNREAD: dict[str, Any] = {"ngpt_alpha": 0.1}
WHERE = ("layers", "token_embedding")


def normed(vector):
    return vector / math.sqrt(sum(float(entry) ** 2 for entry in vector))


class SlowNGPT:
    """One sequence at a time; every scale is its parameter times init over scale."""

    def __init__(self, model):
        self.weights = {name: value.detach() for name, value in model.state_dict().items()}
        self.width = model.config.hidden_size
        self.heads = model.config.num_attention_heads
        self.layers = model.config.num_hidden_layers

    def scale(self, name, init, scale):
        return self.weights[f"{name}.weight"] * (init / scale)

    def rotated(self, vector, position):
        half = len(vector) // 2
        turned = vector.clone()
        for pair in range(half):
            angle = position * 10000 ** (-2 * pair / len(vector))
            left = float(vector[pair])
            right = float(vector[pair + half])
            turned[pair] = left * math.cos(angle) - right * math.sin(angle)
            turned[pair + half] = left * math.sin(angle) + right * math.cos(angle)
        return turned

    def attend(self, path, states):
        dim = self.width // self.heads
        scales = self.scale(f"{path}.qk_scale", 1.0, self.width**-0.5)
        q, k, v = (
            states @ self.weights[f"{path}.{name}_proj.weight"].T for name in ("q", "k", "v")
        )
        joined = torch.zeros_like(states)
        for head in range(self.heads):
            columns = slice(head * dim, (head + 1) * dim)
            scale = scales[columns]
            keys = [self.rotated(scale * normed(key[columns]), i) for i, key in enumerate(k)]
            for i in range(len(states)):
                query = self.rotated(scale * normed(q[i, columns]), i)
                grown = [math.exp(math.sqrt(dim) * float(query @ keys[j])) for j in range(i + 1)]
                for j, weight in enumerate(grown):
                    joined[i, columns] += weight / sum(grown) * v[j, columns]
        return joined @ self.weights[f"{path}.o_proj.weight"].T

    def feed(self, path, states):
        rows = []
        for x in states:
            up = self.weights[f"{path}.up_proj.weight"] @ x
            gate = self.weights[f"{path}.gate_proj.weight"] @ x
            up = up * self.scale(f"{path}.up_scale", 1.0, 1.0)
            gate = gate * self.scale(f"{path}.gate_scale", 1.0, 1.0) * math.sqrt(self.width)
            rows.append(
                self.weights[f"{path}.down_proj.weight"] @ (up * gate / (1 + (-gate).exp()))
            )
        return torch.stack(rows)

    def joined(self, path, states, branch):
        alpha = self.scale(f"{path}_residual.rate", 0.05, self.width**-0.5).abs()
        return torch.stack(
            [
                normed(h + alpha * (normed(f) - h))
                for h, f in zip(states, branch(path, states), strict=True)
            ]
        )

    def logits(self, tokens):
        table = self.weights["model.embeddings.token.weight"]
        states = torch.stack([normed(table[token]) for token in tokens])
        for layer in range(self.layers):
            states = self.joined(f"model.layers.{layer}.attention", states, self.attend)
            states = self.joined(f"model.layers.{layer}.feedforward", states, self.feed)
        gains = self.scale("logit_gain", 1.0, self.width**-0.5)
        return gains * (states @ self.weights["lm_head.weight"].T)


def drawn(**changes):
    """Return a model in float64 of which no scale is as it starts, and some rates are negative."""
    model = tiny(WellposedForCausalLM, **{**PARTS, **changes}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.model.layers[0].attention_residual.rate.weight[0] = -0.4
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_are_those_of_the_paper_with_padding_on_either_side(side, tied):
    model = drawn(tie_word_embeddings=tied)
    slow = SlowNGPT(model)
    ids, mask = padded(ROWS, side, extra=1)
    logits = model(input_ids=ids, attention_mask=mask).logits
    for row, row_logits, row_mask in zip(ROWS, logits, mask, strict=True):
        assert_close(row_logits[row_mask.bool()], slow.logits(row), rtol=1e-10, atol=1e-10)


def test_generation_with_a_cache_reads_rotated_keys():
    model = drawn()
    slow = SlowNGPT(model)
    written: Any = model
    tokens = written.generate(
        torch.tensor([ROWS[0]]), max_new_tokens=3, do_sample=False, pad_token_id=0
    )[0].tolist()
    for length in (len(ROWS[0]), len(ROWS[0]) + 1, len(ROWS[0]) + 2):
        assert int(slow.logits(tokens[:length])[-1].argmax()) == tokens[length]


class Sines(TorchDispatchMode):
    """Count the tables of sines that are computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("attention", ["ngpt", "inverse_d"])
def test_layers_share_one_table_of_rotations(attention, depth):
    """Queries and keys of all layers, also if gradient checkpointing computes them again."""
    parts = PARTS if attention == "ngpt" else {"attention": attention, "position": "none"}
    model = tiny(WellposedForCausalLM, **parts, num_hidden_layers=depth)
    ids = torch.tensor([ROWS[0]])
    counts = []
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.train().activation_checkpointing_enable()
        with Sines() as sines:
            model(input_ids=ids, labels=ids).loss.backward()
        counts.append(sines.count)
        gradients.append([weight.grad.clone() for weight in model.parameters()])
        model.zero_grad()
    assert counts == [1, 1]
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_a_step_with_a_cache_computes_two_tables():
    """That of its queries, and that of all keys."""
    model = drawn()
    cache = model(input_ids=torch.tensor([ROWS[0]]), use_cache=True).past_key_values
    with Sines() as sines:
        model(input_ids=torch.tensor([[1]]), past_key_values=cache)
    assert sines.count == 2


def test_eigen_learning_rates_start_at_alpha():
    model = tiny(WellposedForCausalLM, **PARTS, num_hidden_layers=1)
    other = tiny(WellposedForCausalLM, **{**PARTS, **ngpt(0.3)}, num_hidden_layers=1)
    for built, alpha in ((model, 0.05), (other, 0.3)):
        rates = built.model.layers[0].feedforward_residual.rate.factors()
        assert rates.tolist() == pytest.approx([alpha] * 12)


def test_states_are_of_norm_one_in_every_layer():
    states = drawn()(input_ids=torch.tensor(ROWS[:1]), output_hidden_states=True).hidden_states
    assert len(states) == 3
    for state in states:
        within(state.norm(dim=-1), torch.ones(1, 7, dtype=torch.float64), 1e-12)


def test_states_stay_in_float32_under_autocast():
    model = tiny(WellposedModel, **{k: v for k, v in PARTS.items() if k != "logit_gain"})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = model(input_ids=torch.tensor(ROWS[:1])).last_hidden_state
    assert states.dtype is torch.float32
    within(states.norm(dim=-1), torch.ones(1, 7), 1e-5)


def test_a_step_of_adam_moves_a_scale_by_start_over_unit():
    scale = wn.LearnedScale(3, start=2.0, unit=0.5)
    assert scale.factors().tolist() == [2.0, 2.0, 2.0]
    optimizer = torch.optim.Adam(scale.parameters(), lr=0.01)
    scale(torch.ones(3)).sum().backward()
    optimizer.step()
    within(scale.factors().detach(), torch.full((3,), 2.0 - 0.01 * 2.0 / 0.5), 1e-6)


def test_one_line_keeps_every_vector_along_the_tokens_at_norm_one():
    model = tiny(WellposedForCausalLM, **PARTS)
    assert model.lm_head.weight is model.model.embeddings.token.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    handle = wp.constrain_(model, optimizer, where=WHERE, to="hypersphere")
    ids = torch.tensor(ROWS[:1])
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3
    assert handle.error().worst <= 1e-6
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            along = 0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            lengths = weight.detach().double().norm(dim=along)
            within(lengths, torch.ones_like(lengths), 1e-6)


def test_roles_are_found_by_the_pass_and_no_scale_decays():
    model = tiny(WellposedForCausalLM, **PARTS)
    roles = wp.find_roles(model)
    assert roles.notes == ()
    assert [part.gate is not None for part in roles.feedforward] == [True, True]
    groups = wp.constrain.parameter_groups(model, 0.1, where=WHERE)
    assert [group["weight_decay"] for group in groups] == [0.0]


def test_the_monitor_reads_its_logits():
    model = tiny(WellposedForCausalLM, **PARTS)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.tensor(ROWS[:1])
    with wp.Monitor(model, optimizer, every=1) as monitor:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        measured = monitor.step()
    logits = [value for name, value in measured.items() if name.endswith("/logit_max")]
    assert len(logits) == 6  # two layers of three heads
    # sqrt(4) times a cosine, as scales start at 1.
    assert all(0.0 < value <= 2.0 + 1e-5 for value in logits)


REFUSALS = {
    "residual": lambda m: wp.certify(m.model, seq_len=4, radius=1.0),
    "gain": lambda m: wp.certify(m, seq_len=4, radius=1.0),
    "attention": lambda m: wp.certify(m.model.layers[0].attention, seq_len=4, radius=1.0),
    "feed-forward": lambda m: wp.certify(m.model.layers[0].feedforward, seq_len=4),
}
REASONS = {
    "residual": "attention_residual is a NGPTResidual, which divides states and branch by",
    "gain": "learnt factors of its logits",
    "attention": "NGPTAttention",
    "feed-forward": "NGPTFeedForward",
}


@pytest.mark.parametrize("part", REFUSALS)
def test_certify_refuses_it_by_name(part):
    certificate = REFUSALS[part](tiny(WellposedForCausalLM, **PARTS).eval())
    assert certificate.total == math.inf
    assert REASONS[part] in certificate.table()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tiny(WellposedForCausalLM, **PARTS, qk_norm=True), ConfigError, "norm 1 already"),
        (lambda: wn.NGPTAttention(6, 2), ShapeError, "heads of width 3; expected an even width"),
        (lambda: WellposedConfig(**UNREAD), ConfigError, "only residual 'ngpt' reads"),
        (lambda: ngpt(0.0), ConfigError, "alpha = 0.0, expected a finite number > 0"),
    ],
)
def test_mistakes_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_new_vocabulary_keeps_the_gains():
    model = drawn()
    ids = torch.tensor(ROWS[:1])
    before = model(input_ids=ids).logits
    gains = model.logit_gain.factors().detach().clone()
    model.resize_token_embeddings(17, mean_resizing=False)
    within(model(input_ids=ids).logits[..., :13], before, 1e-12)
    assert model.logit_gain.factors()[13:].tolist() == pytest.approx([1.0] * 4)
    model.resize_token_embeddings(11)
    assert torch.equal(model.logit_gain.factors(), gains[:11])
    within(model(input_ids=ids).logits, before[..., :11], 1e-12)


def test_gains_are_read_by_a_model_of_pairs_of_sequences():
    config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "logit_gain": True}
    model = tiny(WellposedForSeq2SeqLM, **config).double().eval()
    plain = copy.deepcopy(model)
    del plain.logit_gain
    ids = torch.tensor(ROWS[:1])
    with torch.no_grad():
        model.logit_gain.weight.mul_(torch.arange(1, 14))
    both = [version(ids, decoder_input_ids=ids).logits for version in (model, plain)]
    # Gains begin in float32.
    within(both[0], both[1] * torch.arange(1, 14), 1e-5)
