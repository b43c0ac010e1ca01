"""Names of earlier versions are refused, and the error says what to use; `exclude` and `where` take all."""

import importlib

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.constrain import MuonAndAdamW, parameter_groups
from wellposed.errors import ConfigError

REMOVED = [
    ("wellposed", "training", "import wellposed_lab.training"),
    ("wellposed", "recipes", "import wellposed_studies"),
    ("wellposed", "orthogonal", "use constrain_"),
    ("wellposed.attack", "WordSwaps", "use wellposed.words.WordSwaps"),
    ("wellposed.certification", "Site", "use RuleContext"),
    ("wellposed.constrain", "OrthogonalityErrors", "use ConstraintErrors"),
    ("wellposed.measurement", "DIAGNOSTICS", "loop over"),
    ("wellposed.models", "SHARPNESS", "use LOGIT_SCALE"),
]


@pytest.mark.parametrize(("module", "old", "advice"), REMOVED)
def test_an_old_name_of_a_module_says_what_to_use(module, old, advice):
    with pytest.raises(AttributeError, match=f"has no attribute '{old}'; {advice}"):
        getattr(importlib.import_module(module), old)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        importlib.import_module(module).Nothing  # noqa: B018


def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def constrained(model, **options):
    return wp.constrain_(model, torch.optim.SGD(model.parameters(), lr=0.1), **options).paths


def fixed_from_data(model, **options):
    return wp.dt_fixup_(model, [torch.ones(1, 2, 8)], seed=0, **options)


def penalty(model, **options):
    return wp.OrthogonalityPenalty(model, query=1.0, **options)


def groups(model, **options):
    return parameter_groups(model, 0.1, **options)


KEYWORDS = [
    (constrained, "constrain_", "roles", "where"),
    (groups, "parameter_groups", "roles", "where"),
    (MuonAndAdamW, "MuonAndAdamW", "roles", "where"),
    (wp.find_roles, "find_roles", "patterns", "where"),
    (penalty, "OrthogonalityPenalty", "patterns", "where"),
    (wp.t_fixup_, "t_fixup_", "leave", "exclude"),
    (wp.t_fixup_, "t_fixup_", "keep", "exclude"),
    (wp.t_fixup_, "t_fixup_", "patterns", "where"),
    (fixed_from_data, "dt_fixup_", "patterns", "where"),
    (fixed_from_data, "dt_fixup_", "leave", "exclude"),
    (fixed_from_data, "dt_fixup_", "keep", "exclude"),
    (wp.remove_norms_, "remove_norms_", "keep", "exclude"),
]


@pytest.mark.parametrize(("call", "name", "old", "new"), KEYWORDS)
def test_an_old_keyword_is_refused_by_its_new_name(call, name, old, new):
    model = layer()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    line = f"^{name}: {old}= is {new}= now; write {new}='query'$"
    with pytest.raises(ConfigError, match=line):
        call(model, **{old: "query"})
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_what_is_excluded_stays_norms_and_weights_alike():
    model = layer()
    before = layer().state_dict()
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
        self.layer = layer()
        self.query = nn.Linear(8, 8)

    def forward(self, x):
        return self.query(self.layer(x))


def test_a_name_that_is_also_a_role_of_other_weights_is_refused():
    batch = torch.randn(2, 3, 8)
    with pytest.raises(ConfigError, match="'query' is the name of a module, and a role of other"):
        constrained(Named(), where="query", batch=batch)
    assert constrained(Named(), where="re:query", batch=batch) == ("query.weight",)
    (label,) = constrained(Named(), where="key", batch=batch)
    assert label == "layer.self_attn.in_proj_weight[8:16]"
