"""The penalty on every family and every way of running a model: it trains, leaves no trace, fails clearly."""

from __future__ import annotations

import copy
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedModel

from wellposed.errors import ConfigError, RoleNotFoundError, ShapeError
from wellposed.penalize import OrthogonalityPenalty

from ..roles.zoo import ZOO

ALL = {"affinity": 1e-2, "attention": 1e-2, "feedforward": 1e-2}


def bert(**options: Any) -> BertModel:
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return BertModel(config).train()


def batch() -> dict[str, Tensor]:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(1, 30, (3, 9)), "attention_mask": mask}


def step(
    model: nn.Module, penalty: OrthogonalityPenalty, inputs: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs)[0].square().mean() + penalty()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ZOO)
def test_a_model_saved_with_the_penalty_attached_loads_without_it(name: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    model = entry.build().eval()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(tmp_path)
        fresh = type(model).from_pretrained(tmp_path)
    else:
        torch.save(model, tmp_path / "model.pt")
        fresh = torch.load(tmp_path / "model.pt", weights_only=False)
    penalty.remove()
    results = []
    for one in (model, fresh):
        torch.manual_seed(2)
        with torch.no_grad():
            results.append(entry.run(one.eval()))
    assert torch.equal(*results)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_watching_changes_no_output_and_no_gradient(implementation: str) -> None:
    model, inputs = bert(), batch()
    model.set_attn_implementation(implementation)
    plain = model(**inputs)[0]
    plain.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    watched = model(**inputs)[0]
    watched.square().mean().backward()
    assert torch.equal(plain, watched)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters() if p.grad is not None)
    penalty.remove()


def test_eager_and_fused_attention_are_penalised_alike() -> None:
    model, inputs = bert().double(), batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    by_sdpa = step(model, penalty, inputs)
    model.set_attn_implementation("eager")
    by_softmax = step(model, penalty, inputs)
    torch.testing.assert_close(by_softmax, by_sdpa, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention_with_masks(needs_weights: bool, causal: bool) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True).double()
    penalty = OrthogonalityPenalty(module, affinity=1.0)
    x, lengths = torch.randn(3, 6, 8).double(), (6, 4, 1)
    padded = torch.arange(6) >= torch.tensor(lengths)[:, None]
    later = torch.ones(6, 6).triu(1).bool() if causal else None
    output, weights = module(x, x, x, key_padding_mask=padded, attn_mask=later, need_weights=needs_weights)
    assert (weights is not None) == needs_weights
    expected = 0.0
    bias = module.in_proj_bias
    query, key = (x @ w.T + b for w, b in zip(module.in_proj_weight.chunk(3)[:2], bias.chunk(3)[:2], strict=True))
    for b, length in enumerate(lengths):
        for head in (slice(0, 4), slice(4, 8)):
            scores = query[b, :length, head] @ key[b, :length, head].T / 2
            affinity = (scores if later is None else scores.masked_fill(later[:length, :length], -torch.inf)).softmax(
                -1
            )
            expected += (affinity.T @ affinity - torch.eye(length)).square().sum().item() / 3
    value = penalty()
    assert value.item() == pytest.approx(expected, rel=1e-12)
    value.backward()
    assert module.in_proj_weight.grad[:16].abs().min() > 0
    assert module.in_proj_weight.grad[16:].abs().max() == 0
    assert output.requires_grad


def test_gradient_checkpointing_changes_nothing() -> None:
    model, inputs = bert().double(), batch()
    penalty = OrthogonalityPenalty(model, **ALL)
    plain = step(model, penalty, inputs)
    model.activation_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(step(model, penalty, inputs), plain, rtol=1e-12, atol=1e-14)
    penalty.remove()


def test_checkpointing_around_multihead_attention() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).double()
            self.checkpoint = False

        def forward(self, x: Tensor) -> tuple[Tensor]:
            if self.checkpoint:
                return (torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False),)
            return (self.layer(x),)

    model, inputs = Checkpointed(), {"x": torch.randn(2, 5, 8).double()}
    penalty = OrthogonalityPenalty(model, **ALL)
    plain = step(model, penalty, inputs)
    model.checkpoint = True
    torch.testing.assert_close(step(model, penalty, inputs), plain, rtol=1e-12, atol=1e-14)


def test_reentrant_checkpointing_is_refused() -> None:
    model, inputs = bert(), batch()
    model.activation_checkpointing_enable({"use_reentrant": True})
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    output = model(**inputs)
    with pytest.raises(ConfigError, match=r"(?s)encoder\.layer\.0\.attention.*use_reentrant=False"):
        penalty()
    assert output is not None


@pytest.mark.parametrize("estimator", ["exact", "probes"])
def test_bf16_autocast_is_close_to_float32(estimator: str) -> None:
    model, inputs = bert(initializer_range=0.2), batch()
    options = {"estimator": estimator, "generator": torch.Generator()} if estimator == "probes" else {}
    penalty = OrthogonalityPenalty(model, **ALL, **options)
    if options:
        options["generator"].manual_seed(5)
    full = step(model, penalty, inputs)
    if options:
        options["generator"].manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**inputs)
        value = penalty()
    model.zero_grad()
    (output[0].float().square().mean() + value).backward()
    assert value.dtype == torch.float32
    rough = torch.cat([p.grad.flatten() for _, p in model.named_parameters() if p.grad is not None])
    exact = torch.cat([gradient.flatten() for gradient in full[1].values()])
    assert torch.nn.functional.cosine_similarity(rough, exact, dim=0) > 0.99


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside torch.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # likewise
@pytest.mark.slow
def test_a_compiled_model_is_watched() -> None:
    model, inputs = bert().double(), batch()
    penalty = OrthogonalityPenalty(model, **ALL)
    plain = step(model, penalty, inputs)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        loss = compiled(**inputs)[0].square().mean() + penalty()
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close((loss.detach(), gradients), plain, rtol=1e-10, atol=1e-12)
    torch.compiler.reset()


def test_sampled_layers_are_unbiased() -> None:
    """Each of the three layers is drawn alone at some step, and the mean of the three is the whole."""
    model, inputs = bert().double(), batch()
    whole = OrthogonalityPenalty(model, affinity=1.0)
    output = model(**inputs)
    full = whole()
    terms = whole.terms()
    whole.remove()
    penalty = OrthogonalityPenalty(model, affinity=1.0, layers_per_step=1)
    drawn: dict[str, float] = {}
    counts: dict[str, int] = {}
    for _ in range(60):
        output = model(**inputs)
        penalty()
        ((name, value),) = penalty.terms().items()
        drawn[name] = value
        counts[name] = counts.get(name, 0) + 1
    assert output is not None
    assert set(drawn) == set(terms)
    assert min(counts.values()) >= 8  # 20 expected, standard deviation 3.7
    assert sum(drawn.values()) / 3 == pytest.approx(full.item(), rel=1e-12)
    assert all(value == pytest.approx(3 * terms[name], rel=1e-12) for name, value in drawn.items())


def test_every_k_is_scaled_by_k_and_follows_a_resumed_step() -> None:
    model, inputs = bert(), batch()
    always = OrthogonalityPenalty(model, attention=1.0)().item()
    penalty = OrthogonalityPenalty(model, affinity=1e-6, attention=1.0, every=4)
    values = []
    for _ in range(8):
        output = model(**inputs)
        values.append(penalty().item())
    assert output is not None
    assert values[1:4] == [0, 0, 0]
    assert values[4] == pytest.approx(4 * always, rel=1e-4)
    penalty.step = 4
    output = model(**inputs)
    assert penalty().item() > 0


def test_schedules_see_the_step() -> None:
    model = bert()
    penalty = OrthogonalityPenalty(model, attention=lambda step: 0.1 * step, key=1.0)
    keys = OrthogonalityPenalty(model, key=1.0)().item()
    values = [penalty().item() for _ in range(3)]
    assert values[0] == pytest.approx(keys, rel=1e-6)
    assert values[2] - keys == pytest.approx(2 * (values[1] - keys), rel=1e-4)
    falling = OrthogonalityPenalty(model, key=lambda step: -1.0)
    with pytest.raises(ConfigError, match=r"schedule of key.*step 0"):
        falling()


@pytest.mark.parametrize("method", ["householder", "gram_schmidt"])
def test_qr_form(method: str) -> None:
    model = bert()
    penalty = OrthogonalityPenalty(model, key=1.0, form="qr", qr_method=method)
    weight = model.encoder.layer[0].attention.self.key.weight.detach().double()
    q, r = torch.linalg.qr(weight)
    q = q if method == "householder" else q * r.diagonal().sign()
    penalty().backward()
    assert penalty.terms()["key.encoder.0"] == pytest.approx((q - weight).norm().item(), rel=1e-5)
    assert model.encoder.layer[0].attention.self.key.weight.grad is not None


def test_a_mapping_of_forms_and_bf16_products() -> None:
    model = bert()
    penalty = OrthogonalityPenalty(model, key=1.0, value=1.0, form={"key": "gram"})
    plain = OrthogonalityPenalty(model, key=1.0, value=1.0)
    rough = OrthogonalityPenalty(model, key=1.0, gram_dtype=torch.bfloat16)
    for one in (penalty, plain, rough):
        one()
    assert penalty.terms()["key.encoder.0"] ** 2 == pytest.approx(plain.terms()["key.encoder.0"], rel=1e-5)
    assert penalty.terms()["value.encoder.0"] == plain.terms()["value.encoder.0"]
    assert rough.terms()["key.encoder.0"] != plain.terms()["key.encoder.0"]
    assert rough.terms()["key.encoder.0"] == pytest.approx(plain.terms()["key.encoder.0"], rel=0.01)


def test_a_weight_in_two_roles_is_counted_once_and_said_so() -> None:
    model = bert()
    inner = model.encoder.layer[0].attention.self
    inner.key = inner.query
    with pytest.warns(UserWarning, match=r"layer\.0\.attention\.self\.key\.weight.*counted once as query"):
        penalty = OrthogonalityPenalty(model, query=1.0, key=1.0)
    penalty()
    assert "query.encoder.0" in penalty.terms()
    assert "key.encoder.0" not in penalty.terms()
    assert len(penalty.notes) == 1
    with pytest.warns(UserWarning, match="counted once"):
        joint = OrthogonalityPenalty(model, attention=1.0)
    joint()
    parts = [inner.query.weight, inner.value.weight, model.encoder.layer[0].attention.output.dense.weight]
    stacked = torch.cat(parts).detach().double()
    expected = (stacked.T @ stacked - torch.eye(16)).square().sum().item()
    assert joint.terms()["attention.encoder.0"] == pytest.approx(expected, rel=1e-5)


def test_cross_attention_only_on_request() -> None:
    model = ZOO["bart"].build()
    inside = OrthogonalityPenalty(model, key=1.0)
    across = OrthogonalityPenalty(model, key=1.0, cross_attention=True)
    inside()
    across()
    assert set(across.terms()) - set(inside.terms()) == {"key.decoder.0.cross", "key.decoder.1.cross"}


def test_an_unused_note_dies_with_its_graph() -> None:
    model, inputs = bert(), batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    output = model(**inputs)
    noted = [ref() for refs in penalty._capture._seen.values() for ref in refs]  # type: ignore[union-attr]
    alive = [weakref.ref(note) for note in noted]
    assert len(alive) == 3
    del noted
    assert all(ref() is not None for ref in alive)
    del output
    assert all(ref() is None for ref in alive)  # at once, without a garbage collection
    with pytest.raises(ConfigError, match="freed"):
        penalty()


def test_calls_in_the_wrong_order_are_explained() -> None:
    model, inputs = bert(), batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    with pytest.raises(ConfigError, match="one forward pass"):
        penalty()
    with pytest.raises(ConfigError, match=r"call penalty\(\) first"):
        penalty.terms()
    output = model(**inputs)
    penalty()
    with pytest.raises(ConfigError, match="one forward pass"):
        penalty()
    penalty.remove()
    penalty.remove()
    with pytest.raises(ConfigError, match="removed"):
        penalty()
    assert output is not None


def test_value_without_gradient_under_no_grad() -> None:
    model, inputs = bert(), batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    with torch.no_grad():
        model(**inputs)
        assert penalty().item() > 0


def test_an_exception_in_the_model_leaves_no_mode_behind() -> None:
    model, inputs = bert(), batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    layer = model.encoder.layer[1].attention.self.value
    handle = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        model(**inputs)
    assert torch._C._len_torch_function_stack() == 0
    handle.remove()
    output = model(**inputs)
    assert penalty().item() > 0
    assert output is not None


def test_copies_and_pickles_do_not_report_to_the_original() -> None:
    model, inputs = bert(), batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    twin = copy.deepcopy(model)
    twin(**inputs)
    with pytest.raises(ConfigError, match="one forward pass"):
        penalty()
    buffer = io.BytesIO()
    torch.save(nn.Sequential(model), buffer)
    assert buffer.tell() > 0


def test_generation_with_a_cache_is_not_in_the_way() -> None:
    from wellposed.models import build_model

    model = build_model("wellposed", "causal_lm", vocab_size=11, hidden_size=8, num_attention_heads=2).eval()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    plain = model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert plain.shape[1] <= 6
    output = model(input_ids=torch.tensor([[3, 4, 5]]))
    assert penalty().item() > 0
    assert output is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_evaluation_of_a_torch_encoder_on_its_fast_path_still_works() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2).eval()
    x, padded = torch.randn(2, 4, 8), torch.tensor([[False, False, False, True], [False] * 4])
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padded)
        penalty = OrthogonalityPenalty(model, affinity=1.0)
        assert torch.equal(model(x, src_key_padding_mask=padded), plain)
        with pytest.raises(ConfigError, match="enable_nested_tensor=False"):
            penalty()
    output = model.train()(x, src_key_padding_mask=padded)
    assert penalty().item() > 0
    assert output is not None


@pytest.mark.parametrize("attention", ["l2", "l2_tied", "l2_contractive", "cosine"])
def test_our_other_attentions_are_watched(attention: str) -> None:
    """Affinities of L2 attention are soft-maxed distances: |A^T A - I|^2 from the distances themselves."""
    from wellposed.models import build_model

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = build_model("wellposed", "sequence_classification", attention=attention, **sizes).double().eval()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    part = model.get_submodule(penalty.roles.attention[0].path)
    projected: list[Tensor] = []
    for name in ("q_proj", "k_proj"):
        layer = getattr(part, name) or part.q_proj
        layer.register_forward_hook(lambda m, args, out: projected.append(out.detach()))
    output = model(input_ids=torch.tensor([[3, 4, 5, 6]]))
    value = penalty()
    assert value.item() > 0
    assert output is not None
    if attention == "cosine":
        return
    query, key = (item.unflatten(-1, (2, -1)).transpose(1, 2) for item in projected[:2])
    affinity = (-torch.cdist(query, key).square() / 4**0.5).softmax(-1)
    expected = (affinity.mT @ affinity - torch.eye(4)).square().sum().item()
    assert value.item() == pytest.approx(expected, rel=1e-9)


class Hidden(nn.Module):
    """An attention that uses no softmax, with names we know."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q_proj(x) @ self.k_proj(x).mT).exp()
        return self.o_proj(scores / scores.sum(-1, keepdim=True) @ self.v_proj(x))


def test_attention_that_cannot_be_seen_is_named() -> None:
    model = nn.Sequential(Hidden())
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    output = model(torch.randn(1, 3, 8))
    with pytest.raises(ConfigError, match=r"(?s)cannot be seen.*\n  0\n.*affinity=0"):
        penalty()
    assert output is not None


def test_flash_only_kernels_are_refused_at_attach_time() -> None:
    model = bert()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"flash_attention_2") as caught:
        OrthogonalityPenalty(model, affinity=1.0)
    assert "set_attn_implementation('sdpa')" in str(caught.value)


def test_bad_input_is_refused_before_training() -> None:
    model = bert()
    with pytest.raises(ConfigError, match=r"(?s)attention = -1.*key = nan"):
        OrthogonalityPenalty(model, attention=-1.0, key=float("nan"))
    with pytest.raises(ConfigError, match="no strength"):
        OrthogonalityPenalty(model)
    with pytest.raises(ConfigError, match="gram_squared"):
        OrthogonalityPenalty(model, key=1.0, form="gram_square")
    with pytest.raises(ConfigError, match="feedforward"):
        OrthogonalityPenalty(model, key=1.0, form={"feed_forward": "gram"})
    for option in (
        {"attention_mode": "both"},
        {"estimator": "all"},
        {"qr_method": "x"},
        {"every": 0},
        {"num_probes": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(option))):
            OrthogonalityPenalty(model, key=1.0, **option)
    with pytest.raises(ConfigError, match="layers_per_step"):
        OrthogonalityPenalty(model, affinity=1.0, layers_per_step=4)
    with pytest.raises(ConfigError, match=r"(?s)query\.weight.*float16"):
        OrthogonalityPenalty(bert().half(), query=1.0)
    with pytest.raises(RoleNotFoundError):
        OrthogonalityPenalty(nn.Linear(3, 3), key=1.0)
    with pytest.raises(RoleNotFoundError, match="embedding"):
        OrthogonalityPenalty(nn.TransformerEncoderLayer(8, 2, 12), embedding=1.0)
    with pytest.raises(RoleNotFoundError, match="affinity"):
        OrthogonalityPenalty(nn.Sequential(nn.Linear(4, 4)), affinity=1.0, patterns={"feedforward_in": "0.weight"})


def test_quantised_weights_are_refused_by_name() -> None:
    model = bert()
    query = model.encoder.layer[0].attention.self.query
    query.weight = nn.Parameter(query.weight.detach().mul(100).to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"layer\.0\.attention\.self\.query .*quantised"):
        OrthogonalityPenalty(model, query=1.0)


def test_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(RoleNotFoundError, match="nothing_like_it"):
        OrthogonalityPenalty(bert(), query=1.0, patterns={"query": "*.nothing_like_it.weight"})


def test_joint_needs_one_input_width() -> None:
    class Uneven(Hidden):
        def __init__(self) -> None:
            super().__init__()
            self.o_proj = nn.Linear(8, 8)
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, 8) for _ in range(3))

    with pytest.raises(ShapeError, match="separate"):
        OrthogonalityPenalty(Uneven(), attention=1.0)
    assert OrthogonalityPenalty(Uneven(), attention=1.0, attention_mode="separate")().item() > 0
