"""Certified norms are at least the true norm at every scale, dtype, shape and matmul precision, and hardly above it."""

import math

import pytest
import torch

from wellposed.errors import ConfigError, NotLipschitzError, ShapeError
from wellposed.linalg import (
    L2Layer,
    certified_spectral_norm,
    full_precision,
    gram_iteration_norm,
    infinity_norm,
    isometry_error,
    l2_constants,
)

METHODS = ("svd", "cholesky", "gram")
# Powers of two, from the smallest denormal number to just below the largest finite one.
EXPONENTS = {
    torch.float64: (-1074, -1070, -1030, -1000, -500, 0, 500, 1000, 1015),
    torch.float32: (-149, -146, -140, -127, -100, -60, 0, 60, 100, 117),
    torch.bfloat16: (-133, -130, -127, -100, 0, 100, 117),
    torch.float16: (-24, -22, -16, 0, 5),
}
SHAPES = ((1, 1), (9, 2), (2, 9), (6, 6), (3, 5, 4), (2, 2, 4, 7), (200, 195))
# Gram iteration in float32 adds its rounding allowance, most at full rank.
TIGHT = {"svd": 2.1e-6, "cholesky": 1e-4, "gram": 0.06}


def scaled(matrix, exponent):
    """``matrix 2^exponent`` in steps that are exact as long as the result is no denormal number."""
    while exponent:
        step = max(-1000, min(1000, exponent))
        matrix = matrix * 2.0**step
        exponent = exponent - step
    return matrix


def matrices(shape, dtype, exponent):
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    dense = torch.randn(shape, generator=generator, dtype=torch.float64)
    for matrix in (dense, dense[..., :, :1] * dense[..., :1, :], torch.zeros_like(dense)):
        yield scaled(matrix / matrix.abs().amax().clamp_min(1e-9), exponent).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "exponent"), [(d, e) for d, es in EXPONENTS.items() for e in es], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_no_bound_is_below_the_norm_anywhere_in_a_dtype(method, dtype, exponent):
    for shape in SHAPES:
        for stored in matrices(shape, dtype, exponent):
            bound = certified_spectral_norm(stored, method=method)
            # Numbers of order one again, exactly, so that the reference neither overflows nor
            # underflows.
            unit = scaled(stored.double(), -exponent)
            unit_bound = scaled(bound.double(), -exponent)
            true = torch.linalg.matrix_norm(unit, 2)
            assert (unit_bound >= true * (1 - 1e-14)).all(), shape
            assert ((unit_bound == 0) == (true == 0)).all()
            # The bound is tight in the range of the computing dtype, plus one denormal step.
            info = torch.finfo(bound.dtype)
            smallest = torch.tensor(info.smallest_normal, dtype=torch.float64)
            step = scaled(smallest, -exponent) * info.eps
            if method in TIGHT and bool(torch.isfinite(bound).all()):
                assert (unit_bound <= true * (1 + TIGHT[method]) + 2 * step).all()


@pytest.mark.parametrize("exponent", [-1074, -600, 0, 600, 1000])
def test_infinity_norm_covers_every_scale(exponent):
    for stored in matrices((5, 4), torch.float64, exponent):
        unit = scaled(stored, -exponent)
        rows = [math.fsum(abs(entry) for entry in row) for row in unit.tolist()]
        bound = float(scaled(infinity_norm(stored), -exponent))
        assert max(rows) <= bound <= max(rows) * (1 + 1e-14)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.int64, torch.bool], ids=str)
def test_weights_that_are_not_real_numbers_are_refused(dtype):
    weight = torch.ones(2, 3, 3).to(dtype)
    for method in METHODS:
        with pytest.raises(ConfigError, match=f"real floating weight, received {dtype}"):
            certified_spectral_norm(weight, method=method)
    for call in (gram_iteration_norm, infinity_norm):
        with pytest.raises(ConfigError, match="real floating"):
            call(weight)
    with pytest.raises(ConfigError, match=f"real floating weight, received {dtype}"):
        L2Layer(torch.ones(2, 3, 3), weight, torch.ones(2, 3, 3)).bound(l2_constants(2))


def spectra(size):
    generator = torch.Generator().manual_seed(size)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    eye = torch.eye(size, dtype=torch.float64)
    left, right = torch.linalg.qr(draw(2, size, size)).Q
    yield "orthogonal", left
    for amount in (1e-6, 1e-4, 1e-2, 0.3, 1.0, 30.0):
        pair = draw(2, size)
        rank_one = torch.outer(*(pair / pair.norm(dim=1, keepdim=True)))
        yield f"orthogonal + {amount} rank one", left + amount * rank_one
    for amount in (1e-4, 0.03, 1.0):
        yield f"3 I + {amount} low rank", 3 * eye + amount * draw(size, 4) @ draw(4, size) / size
        # Top vectors that are orthogonal to ones, or that one coordinate holds.
        difference = eye[0] - eye[1]
        yield f"I + {amount} difference", eye + amount * torch.outer(difference, difference)
        yield f"one entry {1 + amount}", eye + amount * torch.outer(eye[3], eye[3])
    values = torch.cat([torch.ones(size // 2), torch.linspace(1, 0, size - size // 2)]).double()
    yield "flat top", left * values @ right
    yield "clustered", left * (1 + 3e-4 * torch.linspace(0, 1, size).double()) @ right
    yield "linear", left * torch.linspace(0, 1, size).double() @ right
    yield "random", draw(size, 2 * size)
    yield "low rank", draw(size, 5) @ draw(5, size)
    yield "ones", torch.ones_like(eye)
    yield "triangle", torch.ones_like(eye).tril()
    yield "zero", torch.zeros_like(eye)


@pytest.mark.parametrize("size", [192, 257, 400])
def test_the_cholesky_norm_is_within_1e_4_for_every_spectrum(size):
    for name, matrix in spectra(size):
        true = float(torch.linalg.matrix_norm(matrix, 2))
        bound = float(certified_spectral_norm(matrix, method="cholesky"))
        assert true <= bound <= true * (1 + 1e-4), name


# Settings under which float32 products are not float32 products: what each writes, and where.
matmul = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
SETTINGS = {
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cuda": lambda: setattr(matmul[0], "fp32_precision", "tf32"),
    "mkldnn": lambda: setattr(matmul[1], "fp32_precision", "bf16"),
    "global": lambda: setattr(torch.backends, "fp32_precision", "bf16"),
    "allow_tf32": lambda: setattr(matmul[0], "allow_tf32", True),
}


def precisions():
    return [torch.backends.fp32_precision, *(backend.fp32_precision for backend in matmul)]


@pytest.fixture
def inheriting():
    """Backends that follow the global setting; everything is as before afterwards."""
    saved = precisions()
    for backend in matmul:
        backend.fp32_precision = "none"
    yield
    torch.backends.fp32_precision = saved[0]
    for backend, value in zip(matmul, saved[1:], strict=True):
        backend.fp32_precision = value


@pytest.fixture(params=[*SETTINGS, "autocast"])
def setting(request, inheriting):
    if request.param != "autocast":
        SETTINGS[request.param]()
    with torch.autocast("cpu", torch.bfloat16, enabled=request.param == "autocast"):
        yield request.param


def product_error():
    """Error of a float32 product of ones and halves that bfloat16 cannot hold: zero in float32,
    here always."""
    matrix = torch.full((64, 64), 1 + 2.0**-10)
    return float(((matrix @ matrix).double() - 64 * (1 + 2.0**-10) ** 2).abs().max())


def test_full_precision_covers_every_setting_and_gives_it_back(setting):
    before = precisions()
    error = product_error()
    with full_precision():
        assert product_error() <= 64 * 64 * 2.0**-24
        assert all(value in ("none", "ieee") for value in precisions()[1:])
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert precisions() == before
    assert product_error() == error
    assert torch.is_autocast_enabled("cpu") == (setting == "autocast")
    if setting == "autocast":
        assert error > 1e-3, "a guard that is not there would be noticed"


def test_full_precision_leaves_inherited_settings_inheriting(inheriting):
    torch.backends.fp32_precision = "tf32"
    with full_precision():
        assert precisions()[1:] == ["ieee", "ieee"]
    torch.backends.fp32_precision = "ieee"
    assert precisions() == ["ieee", "ieee", "ieee"]


def certified(weight, heads, mixing):
    """Every certified number of linalg."""
    bounds = {method: certified_spectral_norm(weight, method=method) for method in METHODS}
    bounds |= {"infinity": infinity_norm(weight), "isometry": isometry_error(weight)}
    for norm in ("tok", 2, "inf"):
        for method in ("svd", "gram"):
            layer = L2Layer(heads, mixing, heads.mT, method=method)
            bounds[f"l2 {norm} {method}"] = layer.bound(l2_constants(8), norm=norm).value
    return bounds


def test_no_setting_changes_a_certified_number(setting):
    weight = torch.randn(200, 192, generator=torch.Generator().manual_seed(4))
    heads = weight[:64, :64].unflatten(0, (4, 16)).mT
    with full_precision():
        mixing = heads.mT @ heads
        expected = certified(weight, heads, mixing)
    for name, value in certified(weight, heads, mixing).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("norm", ["tok", 2, "inf"])
@pytest.mark.parametrize("exponent", [-240, -60, 0, 60, 240])
def test_the_bound_of_an_l2_layer_is_homogeneous_far_outside_float32(norm, exponent):
    heads, mixing, output = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    constants = l2_constants(7)
    for method in ("svd", "gram"):
        one = L2Layer(heads, mixing, output, method=method).bound(constants, norm=norm).value
        third = 2.0 ** (exponent // 3)
        parts = (heads * third, mixing * third, output * third)
        bound = L2Layer(*parts, method=method).bound(constants, norm=norm).value
        assert float(bound) == float(one) * 2.0**exponent
        assert bound.dtype is torch.float64


@pytest.mark.parametrize("norm", ["tok", 2, "inf"])
def test_products_that_cancel_are_bounded_with_their_rounding(norm):
    """R W_O = 0 up to the rounding of the weights: the product is all rounding, and can be too small."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        basis = torch.linalg.qr(torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)).Q
        mixing = (basis[:, :, :4] @ torch.randn(2, 4, 8, generator=generator).double()).mT.float()
        output = (basis[:, :, 4:] @ torch.randn(2, 4, 8, generator=generator).double()).float()
        heads = torch.randn(2, 8, 8, generator=generator)
        exact, quick = (
            L2Layer(heads, mixing, output, method=method).bound(l2_constants(4), norm=norm).value
            for method in ("svd", "gram")
        )
        assert quick >= exact * (1 - 3e-6)


def test_gram_iteration_shrinks_to_the_norm_and_carries_the_right_gradient():
    matrix = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    true = torch.linalg.matrix_norm(matrix, 2)
    values = [float(gram_iteration_norm(matrix.detach(), iterations=k)) for k in (1, 2, 4, 8, 12)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(true.item(), rel=1e-9)
    (expected,) = torch.autograd.grad(true, matrix)
    (gradient,) = torch.autograd.grad(gram_iteration_norm(matrix, iterations=12), matrix)
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_gram_iteration_of_zero_has_a_finite_gradient():
    zero = torch.zeros(4, 3, requires_grad=True)
    gram_iteration_norm(zero).backward()
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_bad_input(method):
    weight = torch.tensor([[1.0, math.nan, 0.0], [0.0, 0.0, 0.0]])
    with pytest.raises(NotLipschitzError, match="1 of 6 entries"):
        certified_spectral_norm(weight, method=method)
    with pytest.raises(ShapeError, match=r"\(5,\)"):
        certified_spectral_norm(torch.zeros(5), method=method)


def test_unknown_method_lists_the_nearest():
    with pytest.raises(ConfigError, match="nearest: svd"):
        certified_spectral_norm(torch.eye(2), method="sdv")


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (3, 0, 4), (3, 2, 4, 0), (0, 3, 3)])
def test_empty_matrices_have_norm_zero_in_the_shape_of_their_batch(shape):
    empty = torch.zeros(shape)
    norms = [certified_spectral_norm(empty, method=method) for method in METHODS]
    for norm in [*norms, infinity_norm(empty), gram_iteration_norm(empty)]:
        assert norm.shape == shape[:-2]
        assert not norm.any()
