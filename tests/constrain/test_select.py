"""Which weights a selection is, in which order, and what it says where it is none."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from wellposed.constrain import select_weights
from wellposed.errors import ConfigError, RoleNotFoundError


class Special(nn.Linear):
    """A subclass counts as its class."""


def model():
    attention = nn.MultiheadAttention(4, 2)
    return nn.Sequential(
        OrderedDict(
            emb=nn.Embedding(5, 4),
            encoder=nn.Linear(4, 4),
            norm=nn.LayerNorm(4),
            special=Special(4, 3, bias=False),
            att=attention,
        )
    )


def labels(where, owner=None, **options):
    return [found.label for found in select_weights(owner or model(), where, **options)]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("encoder", ["encoder.weight"]),
        ("encoder.weight", ["encoder.weight"]),
        ("encoder.bias", ["encoder.bias"]),
        ("enc*", ["encoder.weight"]),
        ("encoder.*", ["encoder.weight", "encoder.bias"]),
        ("*.encoder", ["encoder.weight"]),
        ("re:emb|norm", ["emb.weight", "norm.weight"]),
        ("re:e.*", ["emb.weight", "encoder.weight"]),
        ("*.bias", ["encoder.bias", "norm.bias", "att.out_proj.bias"]),
        (["special", "emb"], ["emb.weight", "special.weight"]),
        (["emb", "emb"], ["emb.weight"]),
        (nn.Linear, ["encoder.weight", "special.weight", "att.out_proj.weight"]),
        ([nn.Embedding, "encoder"], ["emb.weight", "encoder.weight"]),
        (Special, ["special.weight"]),
        (lambda path, module: path == "norm", ["norm.weight"]),
        (lambda path, module: isinstance(module, nn.Embedding), ["emb.weight"]),
    ],
)
def test_names_types_and_functions_in_the_order_of_the_model(where, found):
    assert labels(where) == found


def test_parts_of_a_fused_weight_come_one_by_one():
    owner = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    rows = [f"self_attn.in_proj_weight[{start}:{start + 4}]" for start in (0, 4, 8)]
    assert labels("self_attn", owner) == rows
    assert labels(None, owner, roles="key") == rows[1:2]
    assert labels(None, owner, roles=("value", "query")) == [rows[0], rows[2]]
    assert labels("linear1", owner, roles="query") == [rows[0], "linear1.weight"]
    assert labels("key", owner) == rows[1:2]
    assert labels(["linear1", "key"], owner) == [rows[1], "linear1.weight"]
    place = select_weights(owner, "key")[0]
    weight = owner.self_attn.in_proj_weight
    assert torch.equal(place.seen(weight), weight[4:8])
    assert (place.rows, place.transposed) == (range(4, 8), False)
    assert place.parameter_name == "self_attn.in_proj_weight"
    assert place.roles == {"key"}


def test_the_models_own_weight_has_no_path():
    linear = nn.Linear(3, 2)
    assert labels("weight", linear) == ["weight"]
    assert labels(nn.Linear, linear) == ["weight"]
    assert labels("0", nn.Sequential(linear)) == ["0.weight"]


def test_a_weight_that_is_computed_is_a_place_without_a_parameter():
    owner = nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 3))
    places = select_weights(owner, nn.Linear)
    found = {place.label: place.parameter is None for place in places}
    assert found == {"0.weight": True, "1.weight": False}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        *(
            (
                where,
                f"where={where!r} matches no module that holds a weight and no parameter; nearest: encoder",
            )
            for where in ("encodr", "*.encodr")
        ),
        (
            nn.Conv1d,
            (
                "where: no module with a weight is matched by Conv1d; types that hold one:"
                " Embedding, LayerNorm, Linear"
            ),
        ),
    ],
)
def test_what_matches_nothing_is_said(where, said):
    owner = nn.Sequential(
        OrderedDict(emb=nn.Embedding(5, 4), encoder=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    )
    with pytest.raises(RoleNotFoundError) as caught:
        select_weights(owner, where)
    assert str(caught.value) == said
    with pytest.raises(RoleNotFoundError) as caught:
        select_weights(owner, [where, "emb", "nothing"])
    assert str(caught.value).splitlines()[0] == said
    assert len(str(caught.value).splitlines()) == 2


def test_a_function_and_a_model_without_weights():
    def never(path, module):
        return False

    with pytest.raises(
        RoleNotFoundError, match=r"matched by the function 'never'; types that hold one: Linear$"
    ):
        select_weights(nn.Sequential(nn.Linear(2, 2)), never)
    with pytest.raises(RoleNotFoundError, match="the model has no weights"):
        select_weights(nn.ReLU(), "a")
    with pytest.raises(RoleNotFoundError, match="types that hold one: none"):
        select_weights(nn.ReLU(), nn.Linear)
    with pytest.raises(ConfigError, match=r"expected where= .* or roles="):
        select_weights(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"expected where= .* or roles="):
        select_weights(nn.Linear(2, 2), roles=())
    for bad in (["a", 3], [], {"a": 1}, 7):
        with pytest.raises(ConfigError, match="expected a name, an fnmatch pattern"):
            select_weights(nn.Linear(2, 2), bad)
    with pytest.raises(ConfigError, match="is not a regular expression"):
        select_weights(nn.Linear(2, 2), "re:(")
