"""Every verb on every family: it does all of its work or says by name what it cannot do."""

from pathlib import Path

import pytest
import torch
from tests.support.many_families import FAMILIES, REFUSED, batch_of, verbs_table

import wellposed as wp
from wellposed.errors import ConfigError, RoleNotFoundError

pytestmark = pytest.mark.slow  # the whole table

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def penalize(model, batch):
    penalty = wp.OrthogonalityPenalty(
        model, query=1.0, key=1.0, attention=1.0, feedforward=1.0, attention_mode="separate",
        cross_attention=True, batch=batch, form="gram",
    )  # fmt: skip
    penalty().backward()
    for weight in penalty.roles.weights():
        if weight.role not in {"token_embedding", "position_embedding"}:
            gradient = weight.view.parameter.grad
            assert gradient is not None
            assert weight.view.matrix_in(gradient).any(), weight.view.label


def constrain(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    options = {"where": ("query", "key"), "per": "head", "batch": batch, "gain": 1.0}
    handle = wp.constrain_(model, optimizer, **options)
    model(**batch)[0].square().sum().backward()
    optimizer.step()
    handle.remove()
    roles = wp.find_roles(model, batch)
    for part in roles.attention:
        for view in (*part.by_head("query"), *part.by_head("key")):
            weight = view.tensor().double()
            small = weight if weight.shape[0] <= weight.shape[1] else weight.mT
            identity = torch.eye(len(small), dtype=torch.float64)
            torch.testing.assert_close(small @ small.mT, identity, rtol=0, atol=1e-4)


def measure(model, batch):
    result = wp.measure(model, batch, spectra=False)
    roles = wp.find_roles(model, batch)
    assert [row["role"] for row in result.rows] == [weight.role for weight in roles.weights()]
    for weight, row in zip(roles.weights(), result.rows, strict=True):
        assert (row["rows"], row["cols"]) == weight.view.shape
        exact = torch.linalg.matrix_norm(weight.view.tensor().detach().double(), 2).item()
        assert row["sigma_max"] == pytest.approx(exact, rel=2e-3)
    listed = "".join(result.notes)
    assert all(name in listed for name in roles.unnamed)


def affinity(model, batch):
    penalty = wp.OrthogonalityPenalty(model, affinity=1.0, batch=batch)
    output = model(**batch)[0]
    value = penalty()
    value.backward()
    assert output.isfinite().all()
    assert len(penalty.terms()) >= 1
    first = next(part for part in penalty.roles.attention if part.kind == "self")
    gradient = first.query.parameter.grad
    assert gradient is not None
    assert first.query.matrix_in(gradient).any()


def t_fixup(model, batch):
    report = wp.t_fixup_(model, batch=batch)
    assert report.norms_removed
    assert not wp.find_roles(model, batch).norms
    assert model(**batch)[0].isfinite().all()


def test_the_page_has_the_table_of_these_tests():
    assert f"\n{verbs_table()}\n" in PAGE.read_text("utf-8"), "run: python tools/support_table.py"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("verb", [penalize, constrain, measure, affinity, t_fixup])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_verb_works_on_a_family_or_is_refused(name, verb):
    model = FAMILIES[name]()
    batch = batch_of(name, model)
    refused = REFUSED.get((name, verb.__name__))
    if refused is None:
        verb(model, batch)
        return
    with pytest.raises((ConfigError, RoleNotFoundError), match=refused):
        verb(model, batch)


def test_rows_between_those_of_other_roles_are_held_by_head_alone():
    model = FAMILIES["gpt-neox"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="per='head'"):
        wp.constrain_(model, optimizer, where="query")
    handle = wp.constrain_(model, optimizer, where="query", per="head")
    labels = [row.path for row in handle.report.rows]
    fused = "layers.0.attention.query_key_value.weight"
    assert labels[:2] == [f"{fused}[0:8]", f"{fused}[24:32]"]
    assert len(labels) == 2 * 4
