"""What an attached penalty holds and leaves: notes, modes, copies, saved models, calls in the wrong
order."""

from __future__ import annotations

import copy
import io
import weakref
from pathlib import Path

import pytest
import torch
from tests.support.penalized import after_forward, batch, bert
from tests.support.zoo import ZOO
from torch import nn
from transformers import PreTrainedModel

from wellposed.errors import ConfigError
from wellposed.penalize import OrthogonalityPenalty


@pytest.mark.parametrize("name", ZOO)
def test_a_model_saved_with_the_penalty_attached_loads_without_it(
    name: str, tmp_path: Path
) -> None:
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


def test_an_unused_note_dies_with_its_graph() -> None:
    model, inputs = bert(), batch()
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


def test_calls_in_the_wrong_order_are_explained() -> None:
    model, inputs = bert(), batch()
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
    assert after_forward(model, penalty, inputs).item() > 0


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

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2}
    model = build_model("wellposed", "causal_lm", **sizes).eval()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert model.generate(torch.tensor([[3, 4]]), **options).shape[1] <= 6
    assert after_forward(model, penalty, {"input_ids": torch.tensor([[3, 4, 5]])}).item() > 0


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
    inputs = {"src": x, "src_key_padding_mask": padded}
    assert after_forward(model.train(), penalty, inputs).item() > 0
