"""TransJect models: the promises of the paper, corrected, on whole models; heads, caches, files and bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import wellposed.nn
from wellposed.constrain import constrain_
from wellposed.errors import ConfigError, ShapeError
from wellposed.models import (
    AutoModelForSequencePairClassification,
    TransJectConfig,
    TransJectForCausalLM,
    TransJectForSequenceClassification,
    TransJectForSequencePairClassification,
    TransJectModel,
    build_model,
)
from wellposed.nn import TransJectBlock

SIZES: dict[str, Any] = {"vocab_size": 13, "max_position_embeddings": 12, "hidden_size": 16, "num_hidden_layers": 3}
IDS, MASK = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
SETTINGS = [
    {"num_experts": 3},
    {"num_experts": 2, "spectrum_norm": "trace", "gating": "normalized", "position": "learned"},
    {"num_experts": 2, "spectrum": "random", "residual": "sigmoid"},
    {"gating": "fixed", "tie_word_embeddings": True},
]
CONFIG = TransJectConfig(**SIZES, num_experts=2)


def blocks(model: Any) -> list[TransJectBlock]:
    body = model if isinstance(model, TransJectModel) else model.model
    return [cast(TransJectBlock, layer) for layer in body.stack.layers]


def awake(model: Any, weight: float = 1.5) -> Any:
    """Give every layer a residual weight, signs alternating, so that the model is far from the identity."""
    with torch.no_grad():
        for index, layer in enumerate(blocks(model)):
            layer.residual.weight.fill_(weight * (-1) ** index)
    return model.eval()


def orthogonality_error(model: nn.Module) -> float:
    """Return the largest |W^T W - I| of every square weight of attention, feed-forward and spectrum, in float64."""
    names = ("left", "right", "up_proj", "down_proj", "basis")
    weights = [
        parameter.detach().double() for path, parameter in model.named_parameters() if path.split(".")[-2] in names
    ]
    assert len(weights) >= 4
    return max(float((weight.T @ weight - torch.eye(len(weight))).abs().max()) for weight in weights)


@pytest.fixture(scope="module")
def trained() -> TransJectForSequenceClassification:
    """Return a classifier after 300 steps of AdamW with a large learning rate."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_experts": 2, "num_labels": 3, "num_hidden_layers": 2}
    model = TransJectForSequenceClassification(TransJectConfig(**{**SIZES, **settings}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    constrain_(model, optimizer, where=model.orthogonal_patterns())
    ids = torch.randint(0, 13, (8, 6))
    losses = []
    for _ in range(300):
        loss = model(input_ids=ids, labels=ids[:, 0] % 3).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    return model.eval()


def test_orthogonality_after_training_and_after_files(trained: Any, tmp_path: Path) -> None:
    assert orthogonality_error(trained) <= 1e-5
    trained.save_pretrained(tmp_path)
    loaded = TransJectForSequenceClassification.from_pretrained(tmp_path)
    assert orthogonality_error(loaded) <= 1e-5
    assert torch.equal(loaded(input_ids=IDS).logits, trained(input_ids=IDS).logits)
    assert any(abs(float(layer.residual.weight.detach())) > 0.05 for layer in blocks(trained))


def stretch(states: Tensor, start: Tensor) -> Tensor:
    """Return how much the distance of the first two tokens grew."""
    return (states[0, 0] - states[0, 1]).norm() / (start[0, 0] - start[0, 1]).norm()


def bounds(model: Any) -> tuple[list[float], list[float]]:
    """Return the least and the largest factor after each layer (theory.md, B8, statement A)."""
    lower, upper = [1.0], [1.0]
    for layer in blocks(model):
        size = abs(float(torch.tanh(layer.residual.weight.detach().double()))) / len(blocks(model))
        lower.append(lower[-1] * (1 - size) ** 2)
        upper.append(upper[-1] * (1 + size) ** 2)
    return lower, upper


@pytest.mark.parametrize("which", ["random", "trained", "large residuals"])
def test_distances_stay_within_the_bounds_for_random_and_attacked_pairs(trained: Any, which: str) -> None:
    torch.manual_seed(1)
    if which == "trained":
        model = trained.model
    else:
        model = awake(TransJectModel(TransJectConfig(**SIZES, num_experts=2)), 0.4 if which == "random" else 4.0)
    lower, upper = bounds(model)
    for _ in range(20):
        with torch.no_grad():
            output = model(input_ids=torch.randint(0, 13, (1, 6)), output_hidden_states=True)
        for index, state in enumerate(output.hidden_states):
            distances, starts = (torch.cdist(x[0].double(), x[0].double()) for x in (state, output.hidden_states[0]))
            ratios = (distances / starts)[~torch.eye(6, dtype=torch.bool)]
            assert lower[index] * (1 - 1e-5) <= float(ratios.min()) <= float(ratios.max()) <= upper[index] * (1 + 1e-5)
    for sign in (1.0, -1.0):
        attacked = [attack(model, sign, seed) for seed in range(2)]
        assert all(lower[-1] * (1 - 1e-4) <= ratio <= upper[-1] * (1 + 1e-4) for _, ratio in attacked)
        assert all(sign * (after - before) > 0 for before, after in attacked), "the attack found nothing"


def attack(model: Any, sign: float, seed: int) -> tuple[float, float]:
    """Push the first two of six tokens to stretch (or shrink) their distance, with sigma and gates held."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 6, 16, generator=generator)
    with torch.no_grad():
        kept = model.stack(x)

    def ratio(pair: Tensor) -> Tensor:
        whole = torch.cat((pair, x[:, 2:]), dim=1)
        return stretch(model.stack(whole, sigma=kept.sigma, gates=kept.gates).last_hidden_state, whole)

    pair = x[:, :2].clone().requires_grad_()
    optimizer = torch.optim.Adam([pair], lr=0.1)
    before = float(ratio(pair).detach())
    for _ in range(40):
        optimizer.zero_grad()
        (-sign * ratio(pair)).backward()
        optimizer.step()
    return before, float(ratio(pair).detach())


@pytest.mark.parametrize("settings", SETTINGS[:2])
def test_a_fresh_model_is_the_identity(settings: dict[str, Any]) -> None:
    output = TransJectModel(TransJectConfig(**SIZES, **settings))(input_ids=IDS, output_hidden_states=True)
    assert all(torch.equal(state, output.hidden_states[0]) for state in output.hidden_states)


def test_the_whole_model_against_the_formula_in_float64() -> None:
    torch.manual_seed(2)
    model = awake(TransJectModel(TransJectConfig(**SIZES, num_experts=2))).double()
    output = model(input_ids=IDS, attention_mask=MASK)
    for row, length in enumerate(MASK.sum(1).tolist()):
        table = model.embeddings.token.weight
        positions = wellposed.nn.SinusoidalPositions(12, 8).table.double()
        x = torch.stack([torch.cat((table[IDS[row, i]], positions[i])) for i in range(length)])
        basis = model.stack.spectrum.basis.weight
        energy = torch.stack([sum((x[i] @ basis[k]) ** 2 for i in range(length)) for k in range(16)])  # type: ignore
        sigma = energy / (energy.max() + 1e-6)
        for layer in blocks(model):
            r = torch.tanh(layer.residual.weight) / 3
            branches = [
                nn.functional.elu(x @ expert.left.weight.T @ torch.diag(sigma) @ expert.right.weight.T)  # type: ignore
                for expert in layer.attention.experts
            ]
            gate = layer.attention.gate.weight[0]
            scores = torch.stack([gate @ (x + r * branch).max(0).values for branch in branches])
            weights = torch.exp(scores) / torch.exp(scores).sum()
            x = x + r * sum(weight * branch for weight, branch in zip(weights, branches, strict=True))
            up, down = layer.feedforward.up_proj.weight, layer.feedforward.down_proj.weight
            x = x + r * nn.functional.elu(nn.functional.elu(x @ up.T) @ down.T)
        torch.testing.assert_close(output.last_hidden_state[row, :length], x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_no_gradient_comes_from_later_tokens(settings: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = awake(TransJectForCausalLM(TransJectConfig(**SIZES, **settings)))
    start = torch.randn(1, 6, 16, requires_grad=True)
    logits = model(inputs_embeds=start).logits[0]
    earlier = 0.0
    for position in range(6):
        (gradient,) = torch.autograd.grad(logits[position].square().sum(), start, retain_graph=True)
        sizes = gradient[0].abs().amax(-1)
        assert float(sizes[position + 1 :].sum()) == 0.0
        assert float(sizes[position]) > 0.0
        earlier += float(sizes[:position].sum())
    mixes = settings.get("spectrum") != "random" or settings.get("num_experts", 1) > 1
    assert (earlier > 0.0) == mixes


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_generation_with_a_cache_is_that_without(settings: dict[str, Any], how: dict[str, Any]) -> None:
    torch.manual_seed(4)
    config = TransJectConfig(**SIZES, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = awake(TransJectForCausalLM(config))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"max_new_tokens": 5, "do_sample": False, **how}
    cached, whole = (
        model.generate(IDS, attention_mask=mask, use_cache=use_cache, **options) for use_cache in (True, False)
    )
    assert torch.equal(cached, whole)
    alone = model.generate(IDS[:1, 2:], **options)
    assert torch.equal(cached[:1, 5 : alone.shape[1] + 2], alone[:, 3:])


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_cache_filled_in_portions_gives_the_logits_of_one_call(settings: dict[str, Any]) -> None:
    torch.manual_seed(5)
    model = awake(TransJectForCausalLM(TransJectConfig(**SIZES, **settings)))
    ids = torch.randint(0, 13, (2, 9))
    whole = model(input_ids=ids).logits
    cache, parts = None, []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        output = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "max", "first"])
@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_padding_changes_no_logit(pooling: str, position: str) -> None:
    torch.manual_seed(6)
    config = TransJectConfig(**SIZES, num_experts=2, pooling=pooling, position=position)
    model = awake(TransJectForSequenceClassification(config))
    alone = model(input_ids=IDS[1:, :3]).logits
    pads = torch.full((1, 4), 11)
    for ids, mask in (
        (torch.cat((IDS[1:, :3], pads), 1), torch.tensor([[1, 1, 1, 0, 0, 0, 0]])),
        (torch.cat((pads, IDS[1:, :3]), 1), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])),
    ):
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, alone, rtol=1e-5, atol=1e-6)
    unmasked = model(input_ids=torch.cat((IDS[1:, :3], pads), 1)).logits
    assert float((unmasked - alone).abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_the_way_back(settings: dict[str, Any]) -> None:
    torch.manual_seed(7)
    model = awake(TransJectModel(TransJectConfig(**SIZES, **settings)))
    output = model(input_ids=IDS, attention_mask=MASK, output_hidden_states=True)
    start, report = model.invert(output.last_hidden_state, output.sigma, output.gates)
    error = float((start - output.hidden_states[0]).norm(dim=-1).max())
    # The bound is for the exact map of the hidden state as given, which is rounded once.
    assert error <= report.error_bound + 1e-5
    assert error < 1e-4
    assert float((output.last_hidden_state - output.hidden_states[0]).abs().max()) > 0.1


@torch.no_grad()
def test_the_auxiliary_loss_is_that_of_training_alone() -> None:
    torch.manual_seed(8)
    settings: dict[str, Any] = {"reconstruction_weight": 0.3, "num_labels": 2}
    config = TransJectConfig(**SIZES, **settings)
    model = TransJectForSequenceClassification(config)
    spectrum = cast(wellposed.nn.GramSpectrum, model.model.stack.spectrum)
    labels = torch.tensor([0, 1])
    output = model(input_ids=IDS, attention_mask=MASK, labels=labels)
    expected = []
    for row, length in enumerate(MASK.sum(1).tolist()):
        x = model.model(input_ids=IDS[row : row + 1, :length], output_hidden_states=True).hidden_states[0][0].double()
        gram, basis = x.T @ x, spectrum.basis.weight.double()  # rows are the vectors u_k
        rebuilt = basis.T @ torch.diag(torch.diag(basis @ gram @ basis.T)) @ basis
        expected.append(float(((gram - rebuilt) ** 2).sum() / (gram**2).sum()))
    assert float(output.auxiliary_loss) == pytest.approx(0.3 * sum(expected) / 2, rel=1e-5)
    cross_entropy = nn.functional.cross_entropy(output.logits, labels)
    torch.testing.assert_close(output.loss, cross_entropy + output.auxiliary_loss)
    model.eval()
    evaluated = model(input_ids=IDS, attention_mask=MASK, labels=labels)
    assert evaluated.auxiliary_loss is None
    torch.testing.assert_close(evaluated.loss, cross_entropy)
    pair = TransJectForSequencePairClassification(config)
    pair.model.load_state_dict(model.model.state_dict())
    both = pair(input_ids=IDS[:1], input_ids_pair=IDS[1:], attention_mask_pair=MASK[1:])
    assert float(both.auxiliary_loss) == pytest.approx(0.3 * sum(expected) / 2, rel=1e-5)
    quiet = TransJectModel(TransJectConfig(**SIZES, spectrum="random"))
    assert quiet.train()(input_ids=IDS).auxiliary_loss is None


def test_the_towers_of_a_pair_share_one_encoder() -> None:
    torch.manual_seed(9)
    model = awake(TransJectForSequencePairClassification(CONFIG))
    first, _ = model.pooled(IDS, MASK)
    second, _ = model.pooled(IDS.flip(0), MASK.flip(0))
    torch.testing.assert_close(second, first.flip(0))
    features = torch.cat((first, second, first * second, first - second), dim=-1)
    head = model.classifier
    expected = torch.relu(features @ head.hidden.weight.T + head.hidden.bias) @ head.output.weight.T + head.output.bias
    output = model(IDS, MASK, IDS.flip(0), MASK.flip(0))
    torch.testing.assert_close(output.logits, expected)
    with pytest.raises(ShapeError, match="received 1 sequences for 2"):
        model(input_ids=IDS, input_ids_pair=IDS[:1])


KINDS: list[tuple[Any, Any]] = [
    (TransJectModel, AutoModel),
    (TransJectForCausalLM, AutoModelForCausalLM),
    (TransJectForSequenceClassification, AutoModelForSequenceClassification),
    (TransJectForSequencePairClassification, AutoModelForSequencePairClassification),
]


@pytest.mark.parametrize(("cls", "auto"), KINDS)
@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_files_through_the_auto_classes(cls: Any, auto: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(10)
    model = awake(cls(TransJectConfig(**SIZES, **settings)))
    model.save_pretrained(tmp_path)
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is cls
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    given = {"input_ids": IDS, "attention_mask": MASK}
    given |= {"input_ids_pair": IDS, "attention_mask_pair": MASK} if "Pair" in cls.__name__ else {}
    assert torch.equal(loaded.eval()(**given)[0], model(**given)[0])


def test_a_head_on_a_body_from_a_file_is_fresh_and_the_body_is_not(tmp_path: Path) -> None:
    body = awake(TransJectModel(CONFIG))
    body.save_pretrained(tmp_path)
    model = TransJectForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(model.model(input_ids=IDS).last_hidden_state, body(input_ids=IDS).last_hidden_state)
    assert float(model.classifier.weight.detach().abs().max()) > 0.0
    assert float(model.classifier.bias.detach().abs().max()) == 0.0


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_logits(tmp_path: Path) -> None:
    model = awake(TransJectForCausalLM(CONFIG))
    model.save_pretrained(tmp_path)
    code = (
        "import sys, torch, wellposed.models, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(model(input_ids=torch.tensor([[3, 1, 4]])).logits.flatten().tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert eval(done.stdout) == model(input_ids=IDS[:1, :3]).logits.flatten().tolist()


def test_a_tied_output_layer_is_the_embedding() -> None:
    model = TransJectForCausalLM(TransJectConfig(**SIZES, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embeddings.token.weight
    free = TransJectForCausalLM(TransJectConfig(**SIZES))
    assert free.lm_head.weight.shape == (13, 16)
    assert 0.1 < float(model(input_ids=IDS).logits.detach().std()) < 4.0


def test_sines_go_on_beyond_the_positions_and_a_table_does_not() -> None:
    ids = torch.randint(0, 13, (1, 15))
    computed = awake(TransJectModel(CONFIG))
    longer = awake(TransJectModel(TransJectConfig(**{**SIZES, "max_position_embeddings": 20}, num_experts=2)))
    longer.load_state_dict(computed.state_dict())
    torch.testing.assert_close(computed(input_ids=ids)[0], longer(input_ids=ids)[0], rtol=1e-5, atol=1e-5)
    learned = TransJectModel(TransJectConfig(**SIZES, position="learned"))
    for mask in (None, torch.tensor([[0] + [1] * 14])):
        with pytest.raises(ShapeError, match="expected at most 12"):
            learned(input_ids=ids, attention_mask=mask)


def test_every_bad_value_is_in_one_error() -> None:
    bad: list[dict[str, Any]] = [
        {"hidden_size": 15, "num_hidden_layers": 0, "num_experts": 0, "spectrum": "gran", "residual": "plain"},
        {"dropout": 1.0, "spectrum_eps": 0.0, "reconstruction_weight": -1.0, "pad_token_id": 300},
        {"num_expert": 2, "num_attention_heads": 4, "pooling": "min", "gating": "fix", "num_labels": 0},
    ]
    messages = []
    for values in bad:
        with pytest.raises(ConfigError, match=f"TransJectConfig: {len(values)} values are not usable") as caught:
            TransJectConfig(**values)
        messages.append(str(caught.value))
    for part in (
        "hidden_size: received 15; expected an even number", "num_hidden_layers: received 0",
        "num_experts: received 0", "unknown spectrum 'gran'; nearest: gram", "unknown residual 'plain'",
        "dropout: received 1.0", "spectrum_eps: received 0.0; expected a finite number > 0",
        "reconstruction_weight: received -1.0", "received 300; expected a token in [0, 256)",
        "num_expert: unknown key; nearest: num_experts", "num_attention_heads: unknown key", "unknown pooling 'min'",
        "unknown gating 'fix'; nearest: fixed", "num_labels: received 0",
    ):  # fmt: skip
        assert part in "".join(messages)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ConfigError, match="is_causal=False; a language model is causal"):
        TransJectForCausalLM(TransJectConfig(**SIZES, is_causal=False))
    encoder, language = TransJectModel(CONFIG), TransJectForCausalLM(CONFIG)
    with pytest.raises(ConfigError, match="the model is not causal"):
        encoder(input_ids=IDS, use_cache=True)
    with pytest.raises(ConfigError, match="output_attentions=True"):
        encoder(input_ids=IDS, output_attentions=True)
    with pytest.raises(ShapeError, match="padding alone"):
        encoder(input_ids=IDS, attention_mask=torch.tensor([[1] * 5, [0] * 5]))
    with pytest.raises(ShapeError, match="received neither of input_ids and inputs_embeds"):
        encoder()
    with pytest.raises(ShapeError, match=r"X\^0, position codes included"):
        encoder(inputs_embeds=torch.zeros(1, 2, 8))
    with pytest.raises(ConfigError, match=r"expected a wellposed\.nn\.TransJectCache"):
        language(input_ids=IDS, past_key_values=cast(Any, object()))
    with pytest.raises(ConfigError, match="unknown kind of transject model 'seq2seq_lm'"):
        build_model("transject", "seq2seq_lm")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("spectrum", "random"), ("spectrum_norm", "trace"), ("spectrum_eps", 10.0), ("gating", "normalized"),
        ("residual", "sigmoid"), ("position", "learned"), ("pooling", "max"), ("pooling", "first"), ("dropout", 0.5),
        ("is_causal", True), ("num_experts", 3), ("num_hidden_layers", 4),
    ],
)  # fmt: skip
def test_every_option_changes_the_logits(option: str, value: Any) -> None:
    def logits(config: TransJectConfig) -> Tensor:
        torch.manual_seed(11)
        model = TransJectForSequenceClassification(config)
        for layer in blocks(model):
            layer.residual.weight.data.fill_(1.0)
        torch.manual_seed(12)
        return model.train()(input_ids=IDS).logits.detach()

    changed = logits(TransJectConfig(**{**SIZES, "num_experts": 2, option: value}))
    assert float((changed - logits(CONFIG)).abs().max()) > 1e-6


def test_half_precision_under_autocast_trains() -> None:
    model = awake(TransJectForCausalLM(CONFIG)).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(input_ids=IDS, labels=IDS)
    assert output.auxiliary_loss.dtype == torch.float32
    output.loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    whole = model(input_ids=IDS, labels=IDS)
    assert float((whole.loss - output.loss).detach().abs()) < 0.05
