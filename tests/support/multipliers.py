"""Networks with adversarial weights, and a search for slopes that stretch an input most."""

import itertools
import math

import torch

from wellposed.certification.bounds import Matrix, network_of

ADVERSARIAL = (
    "plain", "tiny", "huge", "mixed", "rank one", "zero rows", "zero", "cancels the skip", "bf16", "one large unit",
)  # fmt: skip


def adversarial(kind, widths):
    """Return weights (out, in) of a network of these widths, in float64 unless the kind is bf16."""
    weights = [
        torch.randn(out, width, dtype=torch.float64) / math.sqrt(width)
        for width, out in itertools.pairwise(widths)
    ]
    factors = {"tiny": (1e-6, 1e-6), "huge": (1e6, 1e6), "mixed": (1e-6, 1e6)}
    if kind in factors:
        first, second = factors[kind]
        weights = [first * weights[0], *(second * weight for weight in weights[1:])]
    if kind == "rank one":
        weights = [weight[:, :1] @ weight[:1] for weight in weights]
    if kind == "zero rows":
        weights[0][::2] = 0
        weights[-1][:, 1::2] = 0
    if kind == "zero":
        weights[0].zero_()
    if kind == "cancels the skip":
        weights[-1] = -torch.linalg.pinv(weights[-2])[: widths[-1]].contiguous()
    if kind == "bf16":
        weights = [weight.bfloat16() for weight in weights]
    if kind == "one large unit":
        weights[0][0] *= 1e6
        weights[-1][:, 0] *= 1e-6
    return weights


def network(weights, activation):
    """Return the network of some weights with one activation between them."""
    links = [Matrix(weights[0])]
    for weight in weights[1:]:
        links += [activation, Matrix(weight)]
    return network_of(links)


def _jacobian(made, slopes, skip, scale):
    product = made.weights[0]
    for slope, weight in zip(slopes, made.weights[1:], strict=True):
        product = weight @ (slope[:, None] * product)
    straight = skip * torch.eye(*product.shape, dtype=torch.float64) if skip else 0
    return scale * product + straight


def attained(made, skip, scale, restarts=2, steps=8):
    """Return the largest norm of the Jacobian over slopes in their intervals that is found.

    The norm is convex in the slopes of one layer, so each step moves them to the ends by the sign
    of their effect on the top singular value.
    """
    best = 0.0
    for _ in range(restarts):
        slopes = [mid + half * torch.sign(torch.randn_like(half)) for mid, half in made.slopes]
        for _ in range(steps):
            for layer, (mid, half) in enumerate(made.slopes):
                left, values, right = torch.linalg.svd(_jacobian(made, slopes, skip, scale))
                best = max(best, float(values[0]))
                before = made.weights[0] @ right[0]
                for slope, weight in zip(slopes[:layer], made.weights[1 : layer + 1], strict=True):
                    before = weight @ (slope * before)
                after = scale * left[:, 0]
                for index in range(len(slopes) - 1, layer - 1, -1):
                    after = made.weights[index + 1].mT @ after
                    after = after if index == layer else slopes[index] * after
                slopes[layer] = mid + half * torch.where(before * after >= 0, 1.0, -1.0)
    return best


def vertices(made, skip):
    """Yield the norm of the Jacobian at every choice of ends of the slopes of one hidden layer."""
    ((mid, half),) = made.slopes
    for signs in itertools.product((-1.0, 1.0), repeat=len(mid)):
        slopes = [mid + half * torch.tensor(signs, dtype=torch.float64)]
        yield float(torch.linalg.matrix_norm(_jacobian(made, slopes, skip, 1.0), 2))
