"""Old names of attributes, classes and keywords work as the new ones, with one FutureWarning."""

import importlib
import warnings

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.constrain import MuonAndAdamW, parameter_groups
from wellposed.errors import ConfigError

RENAMED = [
    ("wellposed.certification", "Site", "RuleContext"),
    ("wellposed.constrain", "OrthogonalityErrors", "ConstraintErrors"),
    ("wellposed.models", "SHARPNESS", "LOGIT_SCALE"),
    ("wellposed_lab.compare.named", "NAMED", "RUN_PRESETS"),
    ("wellposed_lab.compare.named", "named_config", "run_preset"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_of_a_module_is_the_same_object(module, old, new):
    home = module.replace("compare.named", "compare.run_presets")
    with pytest.warns(FutureWarning, match=rf"{module}\.{old} is {home}\.{new} now"):
        value = getattr(importlib.import_module(module), old)
    assert value is getattr(importlib.import_module(home), new)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        importlib.import_module(module).Nothing  # noqa: B018


def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def test_old_names_of_attributes_are_read():
    model = layer()
    role = wp.find_roles(model).attention[0]
    handle = wp.constrain_(model, torch.optim.SGD(model.parameters(), lr=0.1), where="key")
    names = [(role, "further", "extra_projections"), (role.key, "entry", "expert")]
    for owner, old, new in (*names, (handle.report.rows[0], "gain", "size")):
        with pytest.warns(FutureWarning, match=f"{old} is {new} now"):
            assert getattr(owner, old) == getattr(owner, new)


def constrained(model, **options):
    return wp.constrain_(model, torch.optim.SGD(model.parameters(), lr=0.1), **options).paths


def fixed(model, **options):
    return [(row.name, row.drawn) for row in wp.t_fixup_(model, **options).rows]


def fixed_from_data(model, **options):
    report = wp.dt_fixup_(model, [torch.ones(1, 2, 8)], seed=0, **options)
    return [(row.name, row.drawn) for row in report.rows]


def penalised(model, **options):
    return wp.OrthogonalityPenalty(model, query=1.0, **options)().item()


def muon(model, **options):
    return [(g["method"], g["weight_decay"]) for g in MuonAndAdamW(model, **options).param_groups]


def decays(model, **options):
    return [len(group["params"]) for group in parameter_groups(model, 0.1, **options)]


def rows_of_query(model, **options):
    return [weight.view.label for weight in wp.find_roles(model, **options).weights()]


BY_ROLE = {"query": "linear1.weight"}
KEYWORDS = [
    (constrained, "roles", "where", ("query", "key")),
    (decays, "roles", "where", "query"),
    (muon, "roles", "where", "query"),
    (rows_of_query, "patterns", "where", BY_ROLE),
    (penalised, "patterns", "where", BY_ROLE),
    (fixed, "leave", "exclude", ("query", "linear1.weight")),
    (fixed, "keep", "exclude", "norm1"),
    (fixed, "patterns", "where", {"feedforward_in": "linear1.weight"}),
    (fixed_from_data, "patterns", "where", {"feedforward_in": "linear1.weight"}),
    (fixed_from_data, "leave", "exclude", "query"),
    (fixed_from_data, "keep", "exclude", "norm2"),
    (wp.remove_norms_, "keep", "exclude", "norm1"),
]


@pytest.mark.parametrize(("call", "old", "new", "value"), KEYWORDS)
def test_an_old_keyword_does_what_the_new_one_does(call, old, new, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        expected = call(layer(), **{new: value})
    with pytest.warns(FutureWarning, match=f"{old}= is {new}= now"):
        assert call(layer(), **{old: value}) == expected
    both = pytest.raises(ConfigError, match=f"put what both name into {new}=")
    with pytest.warns(FutureWarning), both:
        call(layer(), **{old: value, new: value})
    with pytest.warns(FutureWarning):  # an old keyword that names nothing adds nothing
        assert call(layer(), **{old: None, new: value}) == expected


def test_what_is_excluded_stays_norms_and_weights_alike():
    model, before = layer(), layer().state_dict()
    report = wp.t_fixup_(model, exclude=("query", "norm1", "linear2.weight"))
    assert report.norms_removed == ("norm2",)
    after = model.state_dict()
    same = [name for name in after if torch.equal(after[name], before[name])]
    assert {"norm1.weight", "linear2.weight"} <= {*same}
    assert torch.equal(
        after["self_attn.in_proj_weight"][:8], before["self_attn.in_proj_weight"][:8]
    )
    assert "linear1.weight" not in same
    with pytest.raises(ConfigError, match="'norm3'; nearest: norm"):
        wp.t_fixup_(layer(), exclude="norm3")


class Named(nn.Module):
    """A module whose name is the role of weights that it does not have."""

    def __init__(self):
        super().__init__()
        self.layer, self.query = layer(), nn.Linear(8, 8)

    def forward(self, x):
        return self.query(self.layer(x))


def test_a_name_that_is_also_a_role_of_other_weights_is_refused():
    batch = torch.randn(2, 3, 8)
    with pytest.raises(ConfigError, match="'query' is the name of a module, and a role of other"):
        constrained(Named(), where="query", batch=batch)
    assert constrained(Named(), where="re:query", batch=batch) == ("query.weight",)
    (label,) = constrained(Named(), where="key", batch=batch)
    assert label == "layer.self_attn.in_proj_weight[8:16]"
