"""The LSTM baseline: causal, built by name, saved and loaded, and honest about what it has not."""

import torch
from tests.support.refusal import bad_config, bad_shape

from wellposed.models import LSTMForCausalLM, build_model

SIZES = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}


def test_logits_are_those_of_torchs_lstm_and_do_not_see_the_future():
    model = build_model("lstm", "causal_lm", **SIZES).eval()
    assert isinstance(model, LSTMForCausalLM)
    ids = torch.randint(0, 11, (3, 6))
    logits = model(input_ids=ids).logits
    states, _ = model.lstm(model.token.weight[ids])
    assert torch.allclose(logits, states @ model.lm_head.weight.T, atol=1e-6)
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    assert torch.equal(model(input_ids=changed).logits[:, :4], logits[:, :4])


def test_loss_is_the_shifted_cross_entropy_and_trains_every_weight():
    model = build_model("lstm", "causal_lm", **SIZES, tie_word_embeddings=False)
    ids = torch.randint(0, 11, (3, 6))
    output = model(input_ids=ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    assert torch.allclose(output.loss, expected)
    output.loss.backward()
    assert all(
        parameter.grad is not None and bool(parameter.grad.any())
        for parameter in model.parameters()
    )


def test_options_of_transformers_are_refused_together():
    with bad_config(match=r"(?s)attention: received 'l2'.*norm: received 'pre'"):
        build_model("lstm", "causal_lm", **SIZES, attention="l2", norm="pre")
    with bad_config(match="kind of lstm model"):
        build_model("lstm", "sequence_classification", **SIZES)


def test_padding_on_the_left_is_refused():
    model = build_model("lstm", "causal_lm", **SIZES)
    with bad_shape(match="expected it on the right"):
        model(
            input_ids=torch.ones(1, 3, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1]])
        )
