"""The bounds of L2 attention layers whose heads have two coordinates each, so that every norm is a
number."""

import math

import pytest
import torch

from wellposed.errors import ConfigError, ShapeError
from wellposed.linalg import L2Layer, l2_constants

HEADS = 2
WIDTH = 4
CONSTANTS = l2_constants(5)
C = CONSTANTS.c
E = CONSTANTS.row_excess


def blocks(sizes):
    """(H, D, d): head h reads its own two coordinates, by its size and by half of it."""
    weight = torch.zeros(HEADS, WIDTH, 2, dtype=torch.float64)
    for head, size in enumerate(sizes):
        weight[head, 2 * head, 0], weight[head, 2 * head + 1, 1] = size, -size / 2
    return weight


def layer(reads, mixes, writes):
    diagonals = torch.tensor([[size, size / 2] for size in mixes], dtype=torch.float64)
    return blocks(reads), torch.diag_embed(diagonals), blocks(writes).mT.contiguous()


def by_scales(reads, paths, scales, norm):
    """|C| ((1 + 2e) sqrt(sum |W_h|^2/s_h^2) + 2c |[W_h/s_h]|), or in norm 2 |C| |[W_h/s_h]| times
    the bracket."""
    written = max(s * path for s, path in zip(scales, paths, strict=True))
    read = [w / s for w, s in zip(reads, scales, strict=True)]
    if norm == 2:
        return written * max(read) * CONSTANTS.bracket(2)
    return written * ((1 + 2 * E) * math.hypot(*read) + 2 * C * max(read))


CASES = [
    ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)),
    ((3.0, 0.2), (1.0, 1.0), (1.0, 1.0)),
    ((1.0, 1.0), (5.0, 0.1), (2.0, 2.0)),
    ((0.3, 1.7), (1.1, 0.9), (0.2, 4.0)),
    ((1e-9, 2.0), (1e9, 1.0), (1.0, 3.0)),
    ((2.0, 2.0), (0.0, 1.0), (1.0, 1.0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("norm", ["tok", 2])
def test_the_least_of_the_four_forms(case, norm):
    reads, mixes, writes = case
    paths = [r * o for r, o in zip(mixes, writes, strict=True)]
    alone = sum(w * c for w, c in zip(reads, paths, strict=True)) * CONSTANTS.bracket(norm)
    by_mixing = by_scales(reads, paths, [1 / (r or 1.0) for r in mixes], norm)
    as_given = by_scales(reads, paths, [1.0, 1.0], norm)
    shares = [math.sqrt(w / (c or 1.0)) for w, c in zip(reads, paths, strict=True)]
    balanced = by_scales(reads, paths, shares, norm)
    bound = L2Layer(*layer(*case)).bound(CONSTANTS, norm=norm)
    expected = min(alone, by_mixing, as_given, balanced)
    if 0.0 in mixes:  # a silent head has no say; what it reads is left out
        expected = min(expected, alone)
        assert float(bound.value) <= expected * (1 + 1e-5)
        return
    assert float(bound.value) == pytest.approx(expected, rel=2e-5)
    cheap = L2Layer(*layer(*case)).bound(CONSTANTS, norm=norm, per_head_only=True)
    assert float(cheap.value) == pytest.approx(alone, rel=2e-5)
    assert cheap.form == f"sum |W_h||C_h|, {norm} (B3)"
    by_name = {
        f"sum |W_h||C_h|, {norm} (B3)": alone,
        f"|W_O| sqrt(sum |W_h|^2|R_h|^2), {norm} (B3)": by_mixing,
        f"|stack C_h| |[W_h]|, {norm} (B3)": as_given,
        f"balanced stack |s C_h| |[W_h/s]|, {norm} (B3)": balanced,
    }
    assert by_name[bound.form] == pytest.approx(expected, rel=1e-9)


def test_one_head_has_one_form():
    one = tuple(part[:1] for part in layer((2.0, 1.0), (3.0, 1.0), (0.5, 1.0)))
    for norm in ("tok", 2):
        bound = L2Layer(*one).bound(CONSTANTS, norm=norm)
        assert float(bound.value) == pytest.approx(3.0 * CONSTANTS.bracket(norm), rel=2e-5)
        assert bound.form.startswith("sum |W_h||C_h|")


def test_the_inf_norm_row_by_row():
    """B1, coordinate r: |c_r|_1 max|row of W| + 4c of the less of 1 + sqrt d halves of that and
    |c_r|_2 max|row|_2."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 30.0):
        projection = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64) * scale
        mixing = torch.randn(3, 2, 2, generator=generator, dtype=torch.float64)
        output = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
        totals = []
        for r in range(4):
            total = 0.0
            for head in range(3):
                columns = [[float(projection[head, i, k]) for i in range(5)] for k in range(2)]
                read_inf = max(sum(map(abs, column)) for column in columns)
                read_two = math.hypot(*(sum(map(abs, column)) for column in columns))
                path = [float(mixing[head, k] @ output[head, :, r]) for k in range(2)]
                averaging = sum(map(abs, path)) * read_inf
                through_inf = averaging * 2 * C * (1 + math.sqrt(2))
                total += averaging + min(through_inf, math.hypot(*path) * read_two * 4 * C)
            totals.append(total)
        bound = L2Layer(projection, mixing, output).bound(CONSTANTS, norm="inf")
        assert max(totals) <= float(bound.value) <= max(totals) * (1 + 1e-9)


def test_mixings_too_large_to_be_given_come_as_powers_of_two():
    heads = layer((1.0, 0.5), (1.0, 3.0), (2.0, 1.0))
    for norm in ("tok", 2, "inf"):
        plain = L2Layer(*heads).bound(CONSTANTS, norm=norm)
        for powers in ((7, 7), (7, 9), (-30, 2)):
            shares = 2.0 ** torch.tensor(powers, dtype=torch.float64)[:, None, None]
            scaled = L2Layer(heads[0], heads[1] * shares, heads[2]).bound(CONSTANTS, norm=norm)
            shifted = L2Layer(*heads, exponents=torch.tensor(powers)).bound(CONSTANTS, norm=norm)
            assert float(shifted.value) == pytest.approx(float(scaled.value), rel=1e-12)
        huge = L2Layer(*heads, exponents=torch.tensor([9000, 0]))
        assert float(huge.bound(CONSTANTS, norm=norm).value) == math.inf
        assert float(plain.value) > 0
    layered = L2Layer(*heads, exponents=torch.tensor([5, 3]))
    # Largest entries are powers of two apart: 1, 1, 2 and 1/2, 3 (2), 1, so the layers are 2^(5 +
    # 1) and 2^(3 - 1 + 1).
    assert float(layered.exponent) == 6
    assert layered.shares.tolist() == [2.0**-1, 2.0**-3]


def test_shapes_that_do_not_fit_and_norms_that_are_none():
    reads, mixing, output = layer((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    bad = [(reads[0], mixing, output), (reads[..., :1], mixing, output)]
    bad += [(reads, wrong, output) for wrong in (mixing[:1], mixing[0], reads)]
    bad += [(reads, mixing, wrong) for wrong in (output[:1], output.mT.contiguous())]
    for weights in bad:
        with pytest.raises(ShapeError, match="expected projection"):
            L2Layer(*weights)
    with pytest.raises(ConfigError, match="unknown norm"):
        L2Layer(reads, mixing, output).bound(CONSTANTS, norm="l2")


def test_l2_bound_carries_gradient_and_covers_silent_heads():
    w = torch.randn(2, 4, 2)
    r = torch.randn(2, 2, 2)
    o = torch.randn(2, 2, 4)
    parameters = [part.clone().requires_grad_() for part in (w, r, o)]
    for norm in ("tok", 2, "inf"):
        value = L2Layer(*parameters, method="gram").bound(l2_constants(3), norm=norm).value
        assert all(g.abs().sum() > 0 for g in torch.autograd.grad(value, parameters))
        exact = L2Layer(w, r, o).bound(l2_constants(3), norm=norm).value
        assert float(value.detach()) >= float(exact) * (1 - 1e-6)
        w_silent = w.clone()
        w_silent[1] = 0
        alone = L2Layer(w[:1], r[:1], o[:1]).bound(l2_constants(3), norm=norm).value
        silent = L2Layer(w_silent, r, o).bound(l2_constants(3), norm=norm).value
        assert float(silent) == pytest.approx(float(alone), rel=3e-6)
        assert L2Layer(w * 0, r, o).bound(l2_constants(3), norm=norm).value == 0


def test_wide_l2_bound_chooses_a_scaling_without_trying_all():
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(4, 200, 50, generator=generator) / 14
    r = torch.randn(4, 50, 50, generator=generator) / 7
    o = torch.randn(4, 50, 200, generator=generator) / 14
    for norm in ("tok", 2):
        wide = L2Layer(w, r, o, method="cholesky").bound(l2_constants(16), norm=norm)
        cheap = L2Layer(w, r, o).bound(l2_constants(16), norm=norm, per_head_only=True)
        assert wide.value <= cheap.value
