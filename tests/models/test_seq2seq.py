"""The encoder-decoder against a slow float64 one written from the papers; padding, cache, labels; and
generation against loops without a cache."""

import pytest
import torch
from tests.support.close import within
from tests.support.slow_transformer import SlowTransformer, exact, padded
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM

from wellposed.errors import ConfigError
from wellposed.models import GNMTLengthPenalty, WellposedConfig, WellposedForSeq2SeqLM, build_model

SIZES = {
    "vocab_size": 13, "max_position_embeddings": 12, "hidden_size": 12, "num_hidden_layers": 1, "num_decoder_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SOURCES = [[3, 1, 4, 1, 5, 9], [6, 5, 3], [5]]
TARGETS = [[1, 7, 8, 2], [1, 10, 11, 12, 4], [1, 6]]


def build(**changes):
    torch.manual_seed(0)
    return exact(WellposedForSeq2SeqLM(WellposedConfig(**{**SIZES, **changes})))


def slow_logits(slow, source, target):
    memory = slow.hidden(source, is_causal=False, side="encoder.")
    states = slow.hidden(target, is_causal=True, side="decoder.", memory=memory)
    return states @ slow.weights["lm_head.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre", "qk_norm": True, "share_embeddings": False},
        {"norm": "none", "residual": "rezero", "tie_word_embeddings": False},
        {"attention": "cosine", "num_hidden_layers": 2, "num_decoder_layers": 1},
        {"cross_attention": "cosine", "share_embeddings": False, "tie_word_embeddings": False},
    ],
)
def test_logits_are_those_of_the_definition_whatever_the_padding(changes):
    model = build(activation="relu", **changes)
    slow = SlowTransformer(model)
    for source_side, target_side in [("right", "right"), ("left", "left"), ("right", "left")]:
        ids, mask = padded(SOURCES, source_side, extra=2)
        targets, target_mask = padded(TARGETS, target_side, extra=1)
        decoder_mask = None if target_side == "right" else target_mask
        ours = {"decoder_input_ids": targets, "decoder_attention_mask": decoder_mask}
        logits = model(input_ids=ids, attention_mask=mask, **ours).logits
        rows = zip(logits, target_mask, SOURCES, TARGETS, strict=True)
        for row, row_mask, source, target in rows:
            expected = slow_logits(slow, source, target)
            assert_close(row[row_mask.bool()], expected, rtol=1e-10, atol=1e-10)


def test_with_l2_attention_the_cross_attention_is_cosine():
    model = build(attention="l2_tied")
    kinds = {type(layer.attention).__name__ for layer in model.model.decoder.layers}
    crossing = {type(layer.cross_attention).__name__ for layer in model.model.decoder.layers}
    assert kinds == {"L2SelfAttention"}
    assert crossing == {"CosineCrossAttention"}
    with pytest.raises(
        ConfigError, match=r"cross_attention: received 'l2'.*keys come from another sequence only"
    ):
        WellposedConfig(cross_attention="l2")
    with pytest.raises(ConfigError, match="unknown cross-attention 'cosin'; nearest: cosine"):
        WellposedConfig(cross_attention="cosin")


@pytest.mark.parametrize("attention", ["dot_product", "cosine", "l2_tied"])
@pytest.mark.parametrize("portions", [[1] * 4, [2, 2]])
def test_a_cache_in_any_portions_gives_the_logits_of_one_call(attention, portions):
    model = build(attention=attention, num_hidden_layers=2, num_decoder_layers=3)
    ids, mask = padded(SOURCES[:2], "right")
    target = torch.tensor([[1, 7, 8, 2], [1, 10, 11, 12]])
    full = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target)
    assert full.past_key_values is None
    projected = []
    crossing = model.model.decoder.layers[2].cross_attention
    crossing.k_proj.register_forward_hook(lambda *_: projected.append(1))
    cache = None
    parts = []
    start = 0
    read = model.model.encoder(ids, attention_mask=mask)
    for size in portions:
        output = model(
            attention_mask=mask, encoder_outputs=read, decoder_input_ids=target[:, start : start + size],
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        cache = output.past_key_values
        parts.append(output.logits)
        start += size
    within(torch.cat(parts, dim=1), full.logits, 1e-11)
    assert len(projected) == 1
    assert len(cache) == 3


def test_labels_are_shifted_where_no_decoder_input_is_given_and_only_there():
    model = build()
    ids = torch.tensor([[3, 4], [5, 6]])
    labels = torch.tensor([[7, 8, 2], [9, 2, -100]])
    started = torch.tensor([[1, 7, 8], [1, 9, 2]])
    logits = model(input_ids=ids, decoder_input_ids=started).logits.float().log_softmax(-1)
    terms = [-logits[b, t, labels[b, t]] for b, t in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]]
    for extra in ({}, {"decoder_input_ids": started}):
        output = model(input_ids=ids, labels=labels, **extra)
        assert_close(output.loss, sum(terms) / 5, rtol=1e-6, atol=0)
    summed = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(10)).loss
    assert_close(summed, sum(terms) / 10, rtol=1e-6, atol=0)
    for keep in (2, torch.tensor([1, 2])):
        shortened = model(input_ids=ids, labels=labels, logits_to_keep=keep)
        assert shortened.logits.shape[1] == 2
        assert_close(shortened.loss, (sum(terms) - terms[0] - terms[3]) / 3, rtol=1e-6, atol=0)
    other = build(decoder_start_token_id=4)
    assert other.prepare_decoder_input_ids_from_labels(labels).tolist() == [[4, 7, 8], [4, 9, 2]]
    with pytest.raises(ConfigError, match="neither decoder_start_token_id nor bos_token_id"):
        build(bos_token_id=None)(input_ids=ids, labels=labels)


def test_outputs_by_name_by_place_and_from_a_tuple():
    model = build(norm="pre")
    ids = torch.tensor([[3, 4, 5]])
    target = torch.tensor([[1, 7]])
    output = model(input_ids=ids, decoder_input_ids=target, output_hidden_states=True)
    assert (len(output.encoder_hidden_states), len(output.decoder_hidden_states)) == (2, 3)
    assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
    assert torch.equal(output.decoder_hidden_states[-1] @ model.lm_head.weight.T, output.logits)
    logits, *_ = model(input_ids=ids, decoder_input_ids=target, return_dict=False)
    assert torch.equal(logits, output.logits)
    again = model(encoder_outputs=(output.encoder_last_hidden_state,), decoder_input_ids=target)
    assert torch.equal(again.logits, output.logits)


SHARED = "model.encoder.embeddings.token.weight"
OWN = "model.decoder.embeddings.token.weight"
HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("share", "tie", "names"),
    [
        (True, True, {SHARED}),
        (True, False, {SHARED, HEAD}),
        (False, True, {SHARED, OWN}),
        (False, False, {SHARED, OWN, HEAD}),
    ],
)
def test_what_is_shared_is_saved_once_and_comes_back(share, tie, names, tmp_path):
    model = build(share_embeddings=share, tie_word_embeddings=tie).float()
    tables = {name for name, p in model.named_parameters() if p.shape == (13, 12)}
    assert tables == names
    target = model.model.encoder if share else model.model.decoder
    assert (model.lm_head.weight is target.embeddings.token.weight) == tie
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batch = {"input_ids": torch.tensor([[3, 4, 5]]), "decoder_input_ids": torch.tensor([[1, 7]])}
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert {name for name, p in loaded.named_parameters() if p.shape == (13, 12)} == names


@pytest.mark.parametrize("share", [True, False])
def test_the_vocabularies_grow_together(share):
    model = build(share_embeddings=share)
    batch = {"input_ids": torch.tensor([[3, 4]]), "decoder_input_ids": torch.tensor([[1, 7]])}
    before = model(**batch).logits
    model.resize_token_embeddings(20, mean_resizing=False)
    within(model(**batch).logits[..., :13], before, 1e-12)
    wide = model(input_ids=torch.tensor([[19]]), decoder_input_ids=torch.tensor([[19]])).logits
    assert wide.shape == (1, 1, 20)


def run(**changes):
    torch.manual_seed(0)
    model = build_model("wellposed", "seq2seq_lm", **{**SIZES, **changes})
    torch.manual_seed(1)
    ids, mask = padded(SOURCES, "right")
    target, _ = padded(TARGETS, "right")
    return model, model(input_ids=ids, attention_mask=mask, decoder_input_ids=target, labels=target)


@pytest.mark.parametrize(
    "change",
    [
        dict(num_decoder_layers=3),
        dict(num_decoder_layers=None),
        dict(share_embeddings=False),
        dict(norm="pre"),
        dict(qk_norm=True),
        dict(dropout=0.5),
        dict(attention_dropout=0.5),
        dict(scale_embeddings=False),
        dict(position="sinusoidal"),
        dict(residual="rezero"),
        dict(cross_attention="cosine"),
    ],
)
def test_every_option_changes_the_result(change):
    assert (run()[1].logits - run(**change)[1].logits).abs().max() > 1e-4


def test_position_scale_multiplies_sines_only_and_fits_them_to_t_fixup():
    ids = torch.arange(5)
    plain = run(position="sinusoidal")[0].model.encoder.embeddings.position(ids)
    halved = run(position="sinusoidal", position_scale=0.5)[0].model.encoder.embeddings
    assert_close(halved.position(ids), 0.5 * plain)
    fixed = {"position": "sinusoidal", "norm": "none", "init": "t_fixup", "share_embeddings": False}
    model = run(**fixed)[0].model
    assert_close(model.encoder.embeddings.position(ids), (9 * 1) ** -0.25 * plain)
    assert_close(model.decoder.embeddings.position(ids), (9 * 2) ** -0.25 * plain)
    shared = run(**{**fixed, "share_embeddings": True})[0].model
    assert_close(shared.decoder.embeddings.position(ids), (9 * 1) ** -0.25 * plain)
    with pytest.raises(
        ConfigError, match=r"position_scale = 0[.]5, which only position 'sinusoidal' reads"
    ):
        WellposedConfig(position_scale=0.5)


TEXTS = [[3, 1, 4, 1, 5], [9, 2], [6, 6, 7]]
NEW = 6
BEAMS = 3
END = 2
IDS = torch.tensor([row + [0] * (5 - len(row)) for row in TEXTS])
MASK = torch.tensor([[1] * len(row) + [0] * (5 - len(row)) for row in TEXTS])


def speaking(seed=12, **changes):
    """An untied head of moderate size: texts of many lengths, none of them certain."""
    torch.manual_seed(seed)
    config = WellposedConfig(**{**SIZES, "vocab_size": 11, "tie_word_embeddings": False, **changes})
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
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target])}
    logits = model(**inputs).logits
    # transformers scores beams in float32
    return logits[0, -1].float().log_softmax(-1).tolist()


def beams(model, source, divisor):
    """Keep the best running texts; a text that ends among them is finished, with its score divided
    once."""
    running = [(0.0, [1])]
    finished = []
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


DIVISORS = [
    ({"length_penalty": 0.0}, lambda n: 1.0),
    ({"length_penalty": 1.5}, lambda n: n**1.5),
    ({"length_penalty": GNMTLengthPenalty(0.6)}, lambda n: ((5 + n) / 6) ** 0.6),
]


@pytest.mark.parametrize(("penalty", "divisor"), DIVISORS)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("changes", [{}, {"norm": "none", "share_embeddings": False}])
def test_beams_and_their_scores_equal_the_loop(penalty, divisor, cached, changes):
    model = speaking(**changes)
    # early_stopping="never" is the exact search: it stops when no running text can still win
    output = generate(
        model, num_beams=BEAMS, num_return_sequences=BEAMS, early_stopping="never", do_sample=False, use_cache=cached,
        return_dict_in_generate=True, output_scores=True, **penalty,
    )  # fmt: skip
    expected = [pair for source in TEXTS for pair in beams(model, source, divisor)]
    assert any(END in target for _, target in expected)
    # what follows the end is transformers' affair: with padding token 0 its beam search fills up
    # with end tokens
    rows = [up_to_end(row) for row in output.sequences.tolist()]
    assert rows == [up_to_end(target) for _, target in expected]
    scores = torch.tensor([score for score, _ in expected])
    assert_close(output.sequences_scores, scores, rtol=1e-5, atol=1e-5)


def test_beams_share_the_keys_of_their_source_and_only_new_tokens_pass():
    model = speaking()
    projected = []
    widths = []
    layer = model.model.decoder.layers[0]
    layer.cross_attention.k_proj.register_forward_hook(lambda *_: projected.append(1))
    layer.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    generate(model, num_beams=BEAMS, do_sample=False)
    assert projected == [1]
    assert set(widths) == {1}
