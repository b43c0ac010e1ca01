"""Correlations against hand-worked values and against a permutation test."""

import math
import statistics
import sys

import pytest
import torch
from tests.support.refusal import refuses

from wellposed.errors import ConfigError, ShapeError
from wellposed.measurement import correlate, correlations, isomap

pytest.importorskip("scipy")


def test_by_hand():
    # Deviations (-1, 0, 1) and (-1, 1, 0): r = 1 / 2; t = r / sqrt(1 - r^2) with 1 degree of
    # freedom is Cauchy.
    found = correlate([1, 2, 3], [1, 3, 2], names=("factor", "accuracy"))
    assert found.pearson == pytest.approx(0.5)
    assert found.p_value == pytest.approx(1 - 2 * math.atan(1 / math.sqrt(3)) / math.pi)
    assert (found.first, found.second, found.n) == ("factor", "accuracy", 3)
    assert found.spearman == pytest.approx(0.5)


def test_every_two_quantities_across_models():
    models = {
        "post_ln": {"factor": 4.0, "entropy": 5.8, "accuracy": 0.81},
        "rezero": {"factor": 2.0, "entropy": 3.0, "accuracy": 0.83},
        "transject": {"factor": 1.0, "entropy": -1.3, "accuracy": 0.88},
    }
    found = correlations(models)
    assert [(c.first, c.second) for c in found] == [
        ("factor", "entropy"), ("factor", "accuracy"), ("entropy", "accuracy")
    ]  # fmt: skip
    assert found[1].pearson == pytest.approx(statistics.correlation([4, 2, 1], [0.81, 0.83, 0.88]))
    lacking = {**models, "rezero": {"factor": 2.0}}
    refuses(ConfigError, r":\n  rezero: \['factor'\]$", correlations, lacking)
    refuses(ConfigError, "at least two", correlations, {"a": {"factor": 1.0}})


def test_bad_input():
    refuses(ShapeError, "2 values of x and 2 of y", correlate, [1, 2], [1, 2])
    refuses(ConfigError, "not all equal", correlate, [1, 1, 1], [1, 2, 3])
    refuses(ConfigError, "finite", correlate, [1, 2, math.nan], [1, 2, 3])


def test_what_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    refuses(ConfigError, r"p-values need .* 'wellposed\[train\]'", correlate, [1, 2, 3], [1, 3, 2])
    with pytest.raises(ConfigError, match=r"Isomap plots need .* 'wellposed\[train\]'"):
        isomap([torch.ones(1, 3, 2)] * 2, ["a", "b", "c"])
