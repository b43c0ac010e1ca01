"""The life of an attached penalty on every family that roles are found in: training, notes, copies,
saved models, calls in the wrong order."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from tests.support.penalized import after_forward, batch, bert
from tests.support.zoo import ZOO
from torch import nn
from transformers import PreTrainedModel

from wellposed.errors import ConfigError
from wellposed.penalize import OrthogonalityPenalty
from wellposed.roles import find_roles

# Affinities on their own: pulled to identity they ask for longer queries and keys than orthonormal
# weights give.
TOGETHER = {
    "affinity": ("affinity",),
    "zhang2021 weights": ("attention", "feedforward"),
    "mcgrath2024": ("query", "key", "value", "embedding"),
}


QUICK = ("bert", "gpt2", "llama", "t5", "torch encoder")
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]


def everything_on(model):
    """Every attribute and hook of every module by path; modules and tensors by identity, hook
    tables by content."""
    names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    state = {"": names}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            is_hook_table = isinstance(value, dict) and "hooks" in name
            content = list(value) if is_hook_table else id(value)
            state[f"{path}:{name}"] = (type(module), content)
    return state


def strengths_for(model, names):
    tables = any(role.kind == "token" for role in find_roles(model).embeddings)
    return {name: 1.0 for name in names if name != "embedding" or tables}


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("family", FAMILIES)
def test_attach_train_save_load_and_detach(family, names, tmp_path):
    entry = ZOO[family]
    model = entry.build().train()
    before = everything_on(model)
    strengths = strengths_for(model, names)
    penalty = OrthogonalityPenalty(model, **strengths, form="gram_squared")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for _ in range(20):
        torch.manual_seed(1)  # the same tokens and dropout at each step, so that affinities compare
        loss = entry.run(model).square().mean() + penalty()
        history.append(penalty.terms())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert {name.split(".")[0] for name in history[0]} == set(strengths)
    assert [name for name, value in history[0].items() if not history[-1][name] < value] == []

    if isinstance(model, PreTrainedModel):
        model.save_pretrained(tmp_path)
        fresh = type(model).from_pretrained(tmp_path).eval()
    else:
        torch.save(model.state_dict(), tmp_path / "model.pt")
        fresh = entry.build().eval()
        fresh.load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)

    penalty.remove()
    for parameter in model.parameters():
        parameter.grad = None
    assert everything_on(model) == before
    outputs = []
    # After removal: torch's own layers take another kernel while they have hooks.
    for one in (model.eval(), fresh):
        torch.manual_seed(2)
        with torch.no_grad():
            outputs.append(entry.run(one))
    assert torch.equal(*outputs)


def test_an_unused_note_dies_with_its_graph():
    model = bert()
    inputs = batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    output = model(**inputs)
    noted = [ref() for refs in penalty._capture._seen.values() for ref in refs]
    alive = [weakref.ref(note) for note in noted]
    assert len(alive) == 3
    del noted
    assert all(ref() is not None for ref in alive)
    del output
    assert all(ref() is None for ref in alive)  # at once, without a garbage collection
    with pytest.raises(ConfigError, match="freed"):
        penalty()


def test_calls_in_the_wrong_order_are_explained():
    model = bert()
    inputs = batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    with pytest.raises(ConfigError, match="one forward pass"):
        penalty()
    with pytest.raises(ConfigError, match=r"call penalty\(\) first"):
        penalty.terms()
    after_forward(model, penalty, inputs)
    with pytest.raises(ConfigError, match="one forward pass"):
        penalty()
    penalty.remove()
    penalty.remove()
    with pytest.raises(ConfigError, match="removed"):
        penalty()


def test_value_without_gradient_under_no_grad():
    model = bert()
    inputs = batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    with torch.no_grad():
        model(**inputs)
        assert penalty().item() > 0


def test_an_exception_in_the_model_leaves_no_mode_behind():
    model = bert()
    inputs = batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    layer = model.encoder.layer[1].attention.self.value
    handle = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        model(**inputs)
    assert torch._C._len_torch_function_stack() == 0
    handle.remove()
    assert after_forward(model, penalty, inputs).item() > 0


def test_copies_and_pickles_do_not_report_to_the_original():
    model = bert()
    inputs = batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0, every=2)
    twin = copy.deepcopy(model)
    twin(**inputs)
    with pytest.raises(ConfigError, match="one forward pass"):
        penalty()
    buffer = io.BytesIO()
    torch.save(nn.Sequential(model), buffer)
    assert buffer.tell() > 0
    assert pickle.loads(pickle.dumps(penalty)).step == penalty.step
    _, duplicate = copy.deepcopy((model, penalty))
    duplicate.step = 5
    assert not duplicate._capture._is_due(), "its own step, not that of the original"


def test_generation_with_a_cache_is_not_in_the_way():
    from wellposed.models import build_model

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2}
    model = build_model("wellposed", "causal_lm", **sizes).eval()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert model.generate(torch.tensor([[3, 4]]), **options).shape[1] <= 6
    assert after_forward(model, penalty, {"input_ids": torch.tensor([[3, 4, 5]])}).item() > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_evaluation_of_a_torch_encoder_on_its_fast_path_still_works():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2).eval()
    x = torch.randn(2, 4, 8)
    padded = torch.tensor([[False, False, False, True], [False] * 4])
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padded)
        penalty = OrthogonalityPenalty(model, affinity=1.0)
        assert torch.equal(model(x, src_key_padding_mask=padded), plain)
        with pytest.raises(ConfigError, match="enable_nested_tensor=False"):
            penalty()
    inputs = {"src": x, "src_key_padding_mask": padded}
    assert after_forward(model.train(), penalty, inputs).item() > 0
