"""Local bounds of models of transformers: no two inputs in the balls are steeper, and what is refused."""

import math
import subprocess
import sys
from functools import partial

import pytest
import torch
import transformers
from tests.support.local_slopes import steepest
from transformers.models.bert import modeling_bert
from transformers.models.roberta import modeling_roberta

from wellposed.attack import in_dtype
from wellposed.certification import attain, certify, local_radius
from wellposed.errors import NotLipschitzError
from wellposed.models import input_vectors

WIDTH = 8
TOKENS = 4
SIZES = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "vocab_size": 11, "num_labels": 3, "max_position_embeddings": 9, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "vocab_size": 11, "n_positions": 9, "num_labels": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DISTILBERT = {
    "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "vocab_size": 11, "num_labels": 3,
    "max_position_embeddings": 9,
}  # fmt: skip


def bert(kind=transformers.BertForSequenceClassification, **more):
    return kind(transformers.BertConfig(**SIZES, **more))


def gpt2(kind=transformers.GPT2ForSequenceClassification, **more):
    return kind(transformers.GPT2Config(**GPT2, **more))


def rotary(family, kind, **more):
    """Return a small decoder whose two heads share keys and values."""
    config = getattr(transformers, f"{family}Config")(**SIZES, **{"num_key_value_heads": 1, **more})
    return getattr(transformers, f"{family}{kind}")(config)


MODELS = {
    "BertForSequenceClassification": bert,
    "BertModel": lambda: bert(transformers.BertModel),
    "Bert, eager": lambda: bert(attn_implementation="eager"),
    "Bert, gelu_new": lambda: bert(hidden_act="gelu_new"),
    "Bert, relu": lambda: bert(hidden_act="relu"),
    "RobertaForSequenceClassification": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**SIZES)
    ),
    "DistilBertForSequenceClassification": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(**DISTILBERT)
    ),
    "GPT2ForSequenceClassification": gpt2,
    "GPT2LMHeadModel": lambda: gpt2(transformers.GPT2LMHeadModel),
    "GPT2Model, scaled": lambda: gpt2(transformers.GPT2Model, scale_attn_by_inverse_layer_idx=True),
    "GPT2, eager": lambda: gpt2(attn_implementation="eager"),
    "LlamaModel": lambda: rotary("Llama", "Model"),
    "LlamaForCausalLM": lambda: rotary("Llama", "ForCausalLM", num_key_value_heads=2),
    "MistralForSequenceClassification": lambda: rotary("Mistral", "ForSequenceClassification"),
    "Qwen2Model": lambda: rotary("Qwen2", "Model"),
}
DECODERS = ("GPT2", "Llama", "Mistral", "Qwen2")


def made(name, seed=0, size=6.0):
    """Return a model with weights larger than at first, so that every part matters."""
    torch.manual_seed(seed)
    model = MODELS[name]().double().eval().requires_grad_(False)
    for path, weight in model.named_parameters():
        if weight.ndim > 1 and "embeddings" not in path:
            weight.mul_(size)
        elif weight.ndim == 1:
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def inputs(seed=0, count=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def run(model, x):
    out = model(inputs_embeds=x)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("radius", [1e-4, 0.03, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_no_two_inputs_in_the_balls_are_steeper(name, radius):
    model = made(name)
    x = inputs()
    certificate = certify(model, around=x, radius=radius)
    assert certificate.mask in (("causal",) if name.startswith(DECODERS) else ("full", "any"))
    # The RMSNorm of Llama rounds to float32, which moves slopes of tiny steps.
    exact = in_dtype(model, torch.float64)
    assert steepest(partial(run, exact), x, radius, 12) <= certificate.total * (1 + 1e-9) < math.inf


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["BertModel", "GPT2Model, scaled"])
def test_small_balls_are_bounded_within_a_factor(name):
    """With weights of the first draw every norm divides by the deviation of its token."""
    model = made(name, size=1.0)
    x = inputs(count=1)
    total = certify(model, around=x, radius=1e-4, cross_check=False).total
    slope = steepest(partial(run, model), x, 1e-4, steps=40)
    assert slope <= total < 4 * slope


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2ForSequenceClassification"])
def test_an_answer_stays_within_the_certified_radius(name):
    model = made(name, size=1.0)
    x = inputs(3)
    radii = local_radius(model, x, steps=8)
    assert bool((radii > 1e-3).all())
    answers = run(model, x).argmax(-1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        moved = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        moved = 0.999 * radii[:, None, None] * moved / moved.norm(dim=-1, keepdim=True)
        assert bool((run(model, x + moved).argmax(-1) == answers).all())


def test_ids_are_certified_by_their_vectors():
    model = made("BertForSequenceClassification")
    ids = torch.tensor([[1, 2, 3, 4]])
    certificate = certify(model, around=input_vectors(model, ids), radius=1e-3)
    assert bool((certificate.radius(model(input_ids=ids).logits) > 0).all())
    assert attain(certify(made("BertModel"), around=inputs(), radius=0.1), steps=2) is not None


def why(model, **asked):
    certificate = certify(model, **{"around": inputs(), "radius": 1e-3, **asked})
    assert math.isinf(certificate.total)
    return certificate.table()


def test_all_inputs_are_refused_by_name():
    model = made("BertForSequenceClassification")
    assert "pass around= and radius=" in why(model, around=None, radius=None, seq_len=TOKENS)
    with pytest.raises(NotLipschitzError, match="no bound on all inputs"):
        certify(model, seq_len=TOKENS).require()


def test_a_part_of_another_class_is_refused():
    model = made("BertForSequenceClassification")
    layer = model.bert.encoder.layer[0].attention
    layer.self = modeling_roberta.RobertaSelfAttention(model.config).double().eval()
    assert "RobertaSelfAttention, a class whose weights do not say" in why(model)
    model = made("BertForSequenceClassification")
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn.act = torch.sin
    assert "not a GELU" in why(model)


def test_a_replaced_attention_function_is_refused(monkeypatch):
    model = made("Bert, eager")
    original = modeling_bert.eager_attention_forward
    monkeypatch.setattr(
        modeling_bert,
        "eager_attention_forward",
        lambda *args, **options: original(*args, **options),
    )
    assert "stands where transformers runs eager" in why(model)


def test_a_decoder_is_refused():
    model = (
        transformers.BertModel(transformers.BertConfig(**SIZES, is_decoder=True)).double().eval()
    )
    assert "its mask is not that of its family" in why(model)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2"])
def test_a_float64_copy_computes_norms_in_float64(family):
    model = rotary(family, "Model").double().eval()
    x = inputs()
    exact = in_dtype(model, torch.float64)
    torch.testing.assert_close(run(exact, x), run(model, x), rtol=1e-5, atol=1e-5)
    token = x[0, 0]
    norm = exact.layers[0].input_layernorm
    expected = norm.weight * token / (token.square().mean() + norm.variance_epsilon).sqrt()
    torch.testing.assert_close(norm(token), expected, rtol=1e-14, atol=1e-14)
    assert not torch.equal(model.layers[0].input_layernorm(token), norm(token))
    assert "forward" not in vars(model.layers[0].input_layernorm)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2"])
def test_norms_in_float32_do_not_look_like_a_wrong_rule(family):
    """In a float64 model they round to float32, which a step of a small ball shows."""
    model = rotary(family, "ForCausalLM").double().eval()
    for radius in (1e-1, 1e-3, 1e-4):
        assert certify(model, around=inputs(), radius=radius, mask="causal").label == "certified"


def test_small_balls_around_llama_are_bounded_within_a_factor():
    """Attention has the bound of a ball, so the factor is larger than BERT's."""
    model = made("LlamaModel", size=1.0)
    x = inputs(count=1)
    total = certify(model, around=x, radius=1e-4, cross_check=False).total
    slope = steepest(partial(run, in_dtype(model, torch.float64)), x, 1e-4, steps=40)
    assert slope <= total < 12 * slope


def _eager():
    return rotary("Llama", "Model", attn_implementation="eager")


def _scaled_by_length():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return rotary("Llama", "Model", rope_parameters=rope)


def _fewer_layers():
    model = rotary("Llama", "Model")
    model.config.num_hidden_layers = 1
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_eager, "computes the softmax in float32"),
        (_scaled_by_length, "rope_type='dynamic'"),
        (_fewer_layers, "its config runs 1 of 2 layers"),
    ],
)
def test_other_decoders_are_refused_by_name(make, reason):
    assert reason in why(make().double().eval())


def test_a_replaced_rotation_is_refused(monkeypatch):
    source = sys.modules["transformers.models.llama.modeling_llama"]
    original = source.apply_rotary_pos_emb
    monkeypatch.setattr(source, "apply_rotary_pos_emb", lambda *args: original(*args))
    assert "stands where transformers runs apply_rotary_pos_emb" in why(made("LlamaModel"))


def test_transformers_is_not_imported_for_its_rules():
    code = (
        "import sys, torch\nfrom wellposed.certification import certify\n"
        "certify(torch.nn.Linear(2, 2))\nassert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
