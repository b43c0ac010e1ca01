"""The inputs that attack the theorems are those of their proofs, by independent routes."""

import math

import pytest
import torch

from wellposed.linalg import phi_inverse
from wellposed.nn import L2SelfAttention
from wellposed_studies.kim2021 import jacobians
from wellposed_studies.kim2021 import theorems as kim
from wellposed_studies.sengupta2023 import theorems as sengupta


def test_the_head_is_that_of_our_layer_with_the_matrix_a():
    width = 4
    layer = L2SelfAttention(width, 1, bias=False).double()
    identity = torch.eye(width, dtype=torch.float64)
    for projection in (layer.v_proj, layer.o_proj):
        projection.weight.data.copy_(identity)
    x = torch.randn(1, 5, width, dtype=torch.float64)
    query = layer.q_proj.weight.detach().mT
    torch.testing.assert_close(kim._head(query, query)(x[0]), layer(x)[0].detach())


def test_without_a_diagonal_a_row_grows_as_the_distance_of_its_token():
    query = torch.randn(4, 4, dtype=torch.float64)
    small, large = (row["over_bound"] for row in kim._without_diagonal(query, 0)[-2:])
    assert math.isclose(large / small, 10, rel_tol=1e-2)


@pytest.mark.parametrize("spectrum", sengupta._SCALES)
def test_the_attained_slope_is_below_the_jacobian_and_what_is_proved(spectrum):
    width = 5
    layers = 3
    row = sengupta._of_theorem_2(width, layers, spectrum)
    x = torch.eye(width, dtype=torch.float64)
    x[0, 0] = sengupta._RAISED + sengupta._STEP / 2

    def encoded(x):
        """Equations 2 to 4 on whole matrices, one expert, identity weights."""
        elu = torch.nn.functional.elu
        gram = x.mT @ x
        largest = spectrum.startswith("largest")
        between = gram / (torch.linalg.matrix_norm(gram, 2) if largest else gram.trace())
        for _ in range(layers):
            x = x + sengupta._ALPHA / layers * elu(x @ between)
            x = x + sengupta._ALPHA / layers * elu(elu(x))
        return x

    jacobian = torch.autograd.functional.jacobian(encoded, x).reshape(width**2, width**2)
    at_entry = float(jacobian[:, 0].norm())
    assert math.isclose(row["attained"], at_entry, rel_tol=1e-4)
    diagonal = sengupta.encoded_diagonal(x.diagonal(), layers, spectrum)
    torch.testing.assert_close(torch.diag(diagonal), encoded(x))
    assert at_entry <= float(torch.linalg.matrix_norm(jacobian, 2)) <= row["proved"]


def test_lemma_f_2_is_attained_where_its_proof_says():
    count = 10
    width = 3
    c = phi_inverse(count - 1.0)
    signs = torch.ones(count - 1, dtype=torch.float64)
    signs[::2] = -1
    y = torch.zeros(1, count - 1, width, dtype=torch.float64)
    y[0, :, 1] = math.sqrt(1 + c) * signs
    distance, trace = jacobians._spread(y.flatten(1), width)
    assert math.isclose(float(distance), c)
    p = torch.tensor([1.0, *[math.exp(-1 - c)] * (count - 1)], dtype=torch.float64)
    at = torch.cat([torch.zeros(1, width, dtype=torch.float64), y[0]])
    weighted = torch.cov(at.mT, correction=0, aweights=p)
    assert math.isclose(float(trace), float(weighted.trace()))
