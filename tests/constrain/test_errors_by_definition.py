"""The error of every set by its definition in float64, also before and after a projection."""

import pytest
import torch

from wellposed.constrain import SETS

SIZE = 1.7
TOLERANCE = 1e-5


def gram_distance(matrix):
    rows, columns = matrix.shape
    small = matrix.T @ matrix if rows >= columns else matrix @ matrix.T
    return float((small / SIZE**2 - torch.eye(len(small))).abs().max())


def norm_excess(matrix):
    return max(0.0, float(torch.linalg.svdvals(matrix)[0]) / SIZE - 1.0)


def length_distance(matrix, dim):
    return float((torch.linalg.vector_norm(matrix, dim=dim) / SIZE - 1.0).abs().max())


BY_DEFINITION = {
    "orthogonal": gram_distance,
    "spectral": norm_excess,
    "spectral_soft": norm_excess,
    "columns": lambda matrix: length_distance(matrix, 0),
    "rows": lambda matrix: length_distance(matrix, 1),
}


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("name", BY_DEFINITION)
def test_errors_before_and_after_a_projection(name, shape):
    torch.manual_seed(0)
    stack = torch.randn(3, *shape)
    matrix_set = SETS.get(name)(SIZE, TOLERANCE)
    result = matrix_set.nearest_stack(stack)
    definition = BY_DEFINITION[name]
    before = [definition(matrix.double()) for matrix in stack]
    after = [definition(matrix.double()) for matrix in result.matrices.float()]

    assert min(before) > 0.1, "all are outside"
    assert result.sizes == [SIZE] * 3
    # Certified norms are at most 1e-6 above the norm.
    assert result.before == pytest.approx(before, rel=1e-5)
    assert [matrix_set.error(matrix) for matrix in stack] == pytest.approx(before, rel=1e-5)
    assert result.after == pytest.approx(after, abs=3e-6)
    assert max(result.after) <= matrix_set.tolerance
