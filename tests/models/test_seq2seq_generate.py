"""Greedy, sampled and beam generation against loops without a cache in float64; both length
penalties."""

import json

import pytest
import torch
from tests.support.refusal import bad_config
from tests.support.tiny import options
from torch.testing import assert_close
from transformers import BartConfig, BartForConditionalGeneration

from wellposed.models import GNMTLengthPenalty, WellposedConfig, WellposedForSeq2SeqLM

SIZES = {
    "vocab_size": 11, "max_position_embeddings": 12, "hidden_size": 12, "num_hidden_layers": 1, "num_decoder_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SCORED = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False}
NEVER = {"early_stopping": "never", "do_sample": False}
SOURCES = [[3, 1, 4, 1, 5], [9, 2], [6, 6, 7]]
NEW, BEAMS, END = 6, 3, 2
IDS = torch.tensor([row + [0] * (5 - len(row)) for row in SOURCES])
MASK = torch.tensor([[1] * len(row) + [0] * (5 - len(row)) for row in SOURCES])


def build(seed=12, **changes):
    """An untied head of moderate size: texts of many lengths, none of them certain."""
    torch.manual_seed(seed)
    config = WellposedConfig(**{**SIZES, "tie_word_embeddings": False, **changes})
    model = WellposedForSeq2SeqLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
        model.lm_head.weight.mul_(0.6)
    return model


def generate(model, **options):
    torch.manual_seed(7)
    return model.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, **options)


def next_log_probabilities(model, source, target):
    logits = model(
        input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])
    ).logits
    # transformers scores beams in float32
    return logits[0, -1].float().log_softmax(-1).tolist()


def greedy(model, source):
    target = [1]
    while len(target) <= NEW and (len(target) == 1 or target[-1] != END):
        scores = next_log_probabilities(model, source, target)
        target.append(scores.index(max(scores)))
    return target + [0] * (NEW + 1 - len(target))


def beams(model, source, divisor):
    """Keep the best running texts; a text that ends among them is finished, with its score divided
    once."""
    running, finished = [(0.0, [1])], []
    for length in range(1, NEW + 1):
        grown = [
            (score + step, [*target, token])
            for score, target in running
            for token, step in enumerate(next_log_probabilities(model, source, target))
        ]
        grown.sort(key=lambda pair: -pair[0])
        for score, target in grown[:BEAMS]:
            if target[-1] == END or length == NEW:
                finished.append((score / divisor(length), target))
        running = [pair for pair in grown[: 2 * BEAMS] if pair[1][-1] != END][:BEAMS]
    finished.sort(key=lambda pair: -pair[0])
    return finished[:BEAMS]


def up_to_end(row):
    return row[: row.index(END) + 1] if END in row else row


OPTIONS = [{}, {"norm": "pre", "attention": "cosine"}, {"norm": "none", "share_embeddings": False}]


@pytest.mark.parametrize("changes", OPTIONS)
def test_greedy_generation_equals_the_loop(changes):
    model = build(**changes)
    expected = [greedy(model, source) for source in SOURCES]
    assert len({tuple(row) for row in expected}) > 1
    for cached in (True, False):
        tokens = generate(model, do_sample=False, use_cache=cached)
        assert tokens.tolist() == [row[: tokens.shape[1]] for row in expected]


DIVISORS = [
    ({"length_penalty": 0.0}, lambda n: 1.0),
    ({"length_penalty": 1.5}, lambda n: n**1.5),
    ({"gnmt_length_penalty": 1.5}, lambda n: ((5 + n) / 6) ** 1.5),
    ({"length_penalty": GNMTLengthPenalty(0.6)}, lambda n: ((5 + n) / 6) ** 0.6),
]


@pytest.mark.parametrize(("penalty", "divisor"), DIVISORS)
@pytest.mark.parametrize("cached", [True, False])
def test_beams_and_their_scores_equal_the_loop(penalty, divisor, cached):
    model = build()
    # early_stopping="never" is the exact search: it stops when no running text can still win
    output = generate(
        model, num_beams=BEAMS, num_return_sequences=BEAMS, early_stopping="never", do_sample=False, use_cache=cached,
        return_dict_in_generate=True, output_scores=True, **penalty,
    )  # fmt: skip
    expected = [pair for source in SOURCES for pair in beams(model, source, divisor)]
    assert any(END in target for _, target in expected)
    # what follows the end is transformers' affair: with padding token 0 its beam search fills up
    # with end tokens
    assert [up_to_end(row) for row in output.sequences.tolist()] == [
        up_to_end(target) for _, target in expected
    ]
    assert_close(
        output.sequences_scores,
        torch.tensor([score for score, _ in expected]),
        rtol=1e-5,
        atol=1e-5,
    )


def test_the_penalty_is_saved_with_the_model(tmp_path):
    model = build().float()
    model.generation_config.gnmt_length_penalty = 1.5
    how = {"num_beams": BEAMS, **SCORED}
    model.save_pretrained(tmp_path)
    assert (
        json.loads((tmp_path / "generation_config.json").read_text())["gnmt_length_penalty"] == 1.5
    )
    loaded = WellposedForSeq2SeqLM.from_pretrained(tmp_path)
    by_argument = generate(build().float(), gnmt_length_penalty=1.5, **how).sequences_scores
    assert torch.equal(generate(loaded, **how).sequences_scores, by_argument)
    overridden = generate(loaded, length_penalty=1.5, **how).sequences_scores
    assert not torch.equal(overridden, by_argument)
    assert generate(loaded, do_sample=False).shape[0] == 3


def test_penalties_that_cannot_be_meant_are_refused():
    model = build()
    with bad_config(match=r"length_penalty=1.0 \(n\^a\) and gnmt_length_penalty=0.6"):
        generate(model, num_beams=2, length_penalty=1.0, gnmt_length_penalty=0.6)
    with bad_config(match=r"gnmt_length_penalty=0\.6 without beams"):
        generate(model, gnmt_length_penalty=0.6)
    with bad_config(match="expected a finite number"):
        GNMTLengthPenalty(float("nan"))


def test_the_penalty_serves_models_of_transformers():
    sizes = options(
        "d_model=8 encoder_layers=1 decoder_layers=1 encoder_ffn_dim=8 decoder_ffn_dim=8"
    )
    heads = options("encoder_attention_heads=2 decoder_attention_heads=2 forced_eos_token_id=None")
    torch.manual_seed(0)
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=11, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **heads)
    ).eval()
    how = {"num_beams": 2, **SCORED}
    gnmt = generate(model, length_penalty=GNMTLengthPenalty(0.6), **how)
    plain = generate(model, length_penalty=0.0, **how)
    lengths = (plain.beam_indices >= 0).sum(1)
    if torch.equal(gnmt.sequences, plain.sequences):
        assert_close(gnmt.sequences_scores, plain.sequences_scores / ((5 + lengths) / 6) ** 0.6)
    else:
        pytest.fail("the best texts of this model do not depend on the penalty")


def test_beams_share_the_keys_of_their_source_and_only_new_tokens_pass():
    model, projected, widths = build(), [], []
    layer = model.model.decoder.layers[0]
    layer.cross_attention.k_proj.register_forward_hook(lambda *_: projected.append(1))
    layer.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    generate(model, num_beams=BEAMS, do_sample=False)
    assert projected == [1]
    assert set(widths) == {1}
