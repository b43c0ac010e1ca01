"""TransJect models: the formula, padding, heads, options; as a language model; certificates; distances that
are kept, and the way back."""

import pytest
import torch
from tests.support.close import within
from tests.support.transject import CONFIG, IDS, MASK, SETTINGS, SIZES, awake, blocks, slow_stack
from torch import nn
from torch.testing import assert_close

import wellposed.nn
from wellposed.errors import ConfigError, ShapeError
from wellposed.models import (
    TransJectConfig,
    TransJectForCausalLM,
    TransJectForSequenceClassification,
    TransJectForSequencePairClassification,
    TransJectModel,
)


def test_the_whole_model_against_the_formula_in_float64():
    model = awake(TransJectModel(TransJectConfig(**SIZES, num_experts=2))).double()
    output = model(input_ids=IDS, attention_mask=MASK)
    for row, length in enumerate(MASK.sum(1).tolist()):
        table = model.embeddings.token.weight
        positions = wellposed.nn.SinusoidalPositions(12, 8).table.double()
        x = torch.stack([torch.cat((table[IDS[row, i]], positions[i])) for i in range(length)])
        x = slow_stack(model.stack, x)
        assert_close(output.last_hidden_state[row, :length], x, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "max", "first"])
@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_changes_no_logit(pooling, position, is_causal):
    choices = {"pooling": pooling, "position": position, "is_causal": is_causal}
    config = TransJectConfig(**SIZES, num_experts=2, **choices)
    model = awake(TransJectForSequenceClassification(config)).double()
    alone = model(input_ids=IDS[1:, :3]).logits
    pads = torch.full((1, 4), 11)
    for ids, mask in (
        (torch.cat((IDS[1:, :3], pads), 1), torch.tensor([[1, 1, 1, 0, 0, 0, 0]])),
        (torch.cat((pads, IDS[1:, :3]), 1), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])),
    ):
        logits = model(input_ids=ids, attention_mask=mask).logits
        within(logits, alone, 1e-13 * float(alone.abs().max()))
    unmasked = model(input_ids=torch.cat((IDS[1:, :3], pads), 1)).logits
    differs = not (is_causal and pooling == "first")  # the first token sees nothing of what follows
    assert (float((unmasked - alone).abs().max()) > 1e-3) == differs


@torch.no_grad()
def test_the_auxiliary_loss_is_that_of_training_alone():
    settings = {"reconstruction_weight": 0.3, "num_labels": 2}
    config = TransJectConfig(**SIZES, **settings)
    model = TransJectForSequenceClassification(config)
    spectrum = model.model.stack.spectrum
    labels = torch.tensor([0, 1])
    output = model(input_ids=IDS, attention_mask=MASK, labels=labels)
    expected = []
    for row, length in enumerate(MASK.sum(1).tolist()):
        states = model.model(input_ids=IDS[row : row + 1, :length], output_hidden_states=True)
        x = states.hidden_states[0][0].double()
        gram, basis = x.T @ x, spectrum.basis.weight.double()  # rows are the vectors u_k
        rebuilt = basis.T @ torch.diag(torch.diag(basis @ gram @ basis.T)) @ basis
        expected.append(float(((gram - rebuilt) ** 2).sum() / (gram**2).sum()))
    assert float(output.auxiliary_loss) == pytest.approx(0.3 * sum(expected) / 2, rel=1e-5)
    cross_entropy = nn.functional.cross_entropy(output.logits, labels)
    assert_close(output.loss, cross_entropy + output.auxiliary_loss)
    model.eval()
    evaluated = model(input_ids=IDS, attention_mask=MASK, labels=labels)
    assert evaluated.auxiliary_loss is None
    assert_close(evaluated.loss, cross_entropy)
    pair = TransJectForSequencePairClassification(config)
    pair.model.load_state_dict(model.model.state_dict())
    both = pair(input_ids=IDS[:1], input_ids_pair=IDS[1:], attention_mask_pair=MASK[1:])
    assert float(both.auxiliary_loss) == pytest.approx(0.3 * sum(expected) / 2, rel=1e-5)
    quiet = TransJectModel(TransJectConfig(**SIZES, spectrum="random"))
    assert quiet.train()(input_ids=IDS).auxiliary_loss is None


def test_sines_go_on_beyond_the_positions_and_a_table_does_not():
    ids = torch.randint(0, 13, (1, 15))
    computed = awake(TransJectModel(CONFIG))
    sizes = {**SIZES, "max_position_embeddings": 20}
    longer = awake(TransJectModel(TransJectConfig(**sizes, num_experts=2)))
    longer.load_state_dict(computed.state_dict())
    assert_close(computed(input_ids=ids)[0], longer(input_ids=ids)[0], rtol=1e-5, atol=1e-5)
    learned = TransJectModel(TransJectConfig(**SIZES, position="learned"))
    for mask in (None, torch.tensor([[0] + [1] * 14])):
        with pytest.raises(ShapeError, match="expected at most 12"):
            learned(input_ids=ids, attention_mask=mask)


def test_what_transject_has_not_is_named_with_what_to_set_instead():
    unusable = dict(hidden_size=15, spectrum="gran", num_attention_heads=4, intermediate_size=64)
    unusable |= dict(num_hidden_layers=100000000, num_labels=100000000)
    with pytest.raises(ConfigError) as caught:
        TransJectConfig(**unusable)
    assert "TransJectConfig: 6 values are not usable" in str(caught.value)
    assert "num_hidden_layers = 100000000, expected an integer >=" in str(caught.value)
    assert "num_labels = 100000000, expected an integer >= 1 and <" in str(caught.value)
    assert "hidden_size = 15, expected an even number" in str(caught.value)
    assert "spectrum = 'gran', expected 'gram', 'random' or 'redrawn'" in str(caught.value)
    assert "num_attention_heads: unknown key; Gram attention has no heads: set num_experts" in str(
        caught.value
    )
    assert (
        "intermediate_size: unknown key; the feed-forward is orthogonal, so as wide as a token"
        in str(caught.value)
    )


@pytest.mark.parametrize(
    "change",
    [
        dict(spectrum="random"),
        dict(spectrum_norm="trace"),
        dict(spectrum_eps=10.0),
        dict(gating="normalized"),
        dict(residual="sigmoid"),
        dict(position="learned"),
        dict(pooling="max"),
        dict(pooling="first"),
        dict(dropout=0.5),
        dict(is_causal=True),
        dict(num_experts=3),
        dict(num_hidden_layers=4),
    ],
)
def test_every_option_changes_the_logits(change):
    def logits(config):
        torch.manual_seed(11)
        model = TransJectForSequenceClassification(config)
        for layer in blocks(model):
            layer.residual.weight.data.fill_(1.0)
        torch.manual_seed(12)
        return model.train()(input_ids=IDS).logits.detach()

    changed = logits(TransJectConfig(**{**SIZES, "num_experts": 2, **change}))
    assert float((changed - logits(CONFIG)).abs().max()) > 1e-6


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}])
def test_generation_with_a_cache_is_that_without(settings, search):
    config = TransJectConfig(**SIZES, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = awake(TransJectForCausalLM(config))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    search = {"max_new_tokens": 5, "do_sample": False, **search}
    cached, recomputed = (
        model.generate(IDS, attention_mask=mask, use_cache=use, **search) for use in (True, False)
    )
    assert torch.equal(cached, recomputed)
    alone = model.generate(IDS[:1, 2:], **search)
    assert torch.equal(cached[:1, 5 : alone.shape[1] + 2], alone[:, 3:])


def test_a_returned_cache_goes_on_where_the_last_call_of_generate_ended():
    model = awake(TransJectForCausalLM(TransJectConfig(**SIZES, num_experts=2)))
    cfg = dict(do_sample=False, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True)
    first = model.generate(IDS[:1], **cfg)
    prompt = torch.cat((first.sequences, torch.tensor([[7, 2]])), dim=1)
    again = model.generate(prompt, past_key_values=first.past_key_values, **cfg)
    assert_close(again.sequences, model.generate(prompt, use_cache=False, **cfg).sequences)


def test_a_piece_of_padding_is_no_error_in_training_with_a_cache():
    model = awake(TransJectForCausalLM(TransJectConfig(**SIZES, num_experts=2)))
    ids = IDS.repeat(1, 2)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :5] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        model.train()
        first = model(input_ids=ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        assert first.auxiliary_loss is None
        cache = first.past_key_values
        second = model(input_ids=ids[:, 5:], attention_mask=mask, past_key_values=cache)
    assert_close(second.logits, expected[:, 5:])


def test_a_token_of_zeros_meets_no_division_by_zero_at_the_smallest_eps():
    with pytest.raises(ConfigError, match="spectrum_eps = 1e-60"):
        TransJectConfig(**SIZES, spectrum_eps=1e-60)
    config = TransJectConfig(**SIZES, spectrum_eps=2.0**-126, gating="normalized")
    model = awake(TransJectForCausalLM(config))
    assert bool(model(inputs_embeds=torch.zeros(1, 2, 16)).logits.isfinite().all())
