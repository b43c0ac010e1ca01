"""Every class of ours is named in the folder it is saved to, and that folder loads without running
its code."""

import json

import pytest
import torch

from wellposed.models import build_model, load_saved_model
from wellposed.training.folder.save import MODULE, name_our_classes

KINDS = [
    ("wellposed", "causal_lm"),
    ("wellposed", "sequence_classification"),
    ("wellposed", "sequence_pair_classification"),
    ("wellposed", "seq2seq_lm"),
    ("transject", "sequence_classification"),
    ("transject", "causal_lm"),
    ("lstm", "causal_lm"),
]


@pytest.mark.parametrize(("architecture", "kind"), KINDS)
def test_every_class_is_named_and_loads(architecture, kind, tmp_path):
    sizes = {"hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 1}
    model = build_model(architecture, kind, **sizes)
    model.save_pretrained(tmp_path)
    name_our_classes(tmp_path, model)
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    classes = (type(each).__name__ for each in (model, model.config))
    assert sorted(named.values()) == sorted(f"{MODULE}.{name}" for name in classes)
    found = {}
    exec((tmp_path / f"{MODULE}.py").read_text(), found)
    assert found[type(model).__name__] is type(model)
    loaded = load_saved_model(tmp_path)
    assert type(loaded) is type(model)
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
