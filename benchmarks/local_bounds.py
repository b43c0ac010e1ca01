"""Certified radius around one input, from a ball around every token, and the global radius.

For runs of `wellposed train text_classification` with attention dot_product and norms post, pre or
none. The local radius is the largest r for which no move of every token by up to r changes the
class, proved token by token as in docs/theory/composition.md, B22 (float64). The global one is that of
`wellposed.certify` on the smallest ball around the vocabulary. An attack at the local radius must
break no input. Run: OMP_NUM_THREADS=1 python benchmarks/local_bounds.py RUN [RUN ...] --data FOLDER
[--examples 50]
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellposed.models import input_vectors
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.certified.run import best_certificate
from wellposed_lab.training.folder.run_folder import read_config
from wellposed_lab.training.loop.build import load_run_model

# Largest absolute slope of GELU at +sqrt 2 and, below zero, at -sqrt 2.
GELU_UP, GELU_DOWN = 1.1291, 0.1291


def norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2) * (1 + 1e-9)


class LocalBound:
    """Distance that each state can move, for all inputs whose tokens are within r of one input."""

    def __init__(self, model: Any, x: Tensor) -> None:
        self.model, self.x = model, x

    @torch.no_grad()
    def pooled(self, r: float) -> float:
        """Bound the distance of the pooled vector."""
        body = self.model.model
        x = body.embeddings(None, torch.arange(len(self.x))[None], self.x[None])[0]
        moved = torch.full((len(x),), body.embeddings.scale * r, dtype=torch.float64)
        for block in body.layers:
            x, moved = self.sublayer(block, "attention", x, moved)
            x, moved = self.sublayer(block, "feedforward", x, moved)
        if isinstance(body.final_norm, torch.nn.LayerNorm):
            moved = self.normed(body.final_norm, x, moved)
        return float(moved.mean())

    def sublayer(self, block: Any, name: str, x: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """Return a state after a residual sum with its norm, and its largest distance."""
        layer, placed = getattr(block, name), getattr(block, f"{name}_norm")
        is_pre, is_post = (type(placed).__name__ == kind for kind in ("PreNorm", "PostNorm"))
        scale = float(getattr(getattr(block, f"{name}_residual"), "scale", torch.ones(1)))
        read, near = (
            (placed_norm(placed, x), self.normed(placed, x, moved)) if is_pre else (x, moved)
        )
        branch = (
            self.attention(layer, read, near)
            if name == "attention"
            else self.feedforward(layer, read, near)
        )
        x, moved = x + scale * layer(read[None])[0], moved + abs(scale) * branch
        return (placed_norm(placed, x), self.normed(placed, x, moved)) if is_post else (x, moved)

    def normed(self, layer: Any, x: Tensor, moved: Tensor) -> Tensor:
        """Bound a LayerNorm by the smallest deviation in the ball, and by its range."""
        lower = (x.std(-1, correction=0) - moved / math.sqrt(x.shape[-1])).clamp_min(0)
        gain = float(layer.weight.abs().max())
        return (gain * moved / (lower.square() + layer.eps).sqrt()).clamp_max(
            2 * gain * math.sqrt(x.shape[-1])
        )

    def feedforward(self, layer: Any, x: Tensor, moved: Tensor) -> Tensor:
        """Bound `W_2 gelu(W_1 x)` by the possible slopes of each hidden entry."""
        highest = layer.up_proj(x) + moved[:, None] * layer.up_proj.weight.norm(dim=-1)
        normal = torch.distributions.Normal(0.0, 1.0)
        at = normal.cdf(highest) + highest * normal.log_prob(highest).exp()
        slopes = torch.where(highest < math.sqrt(2), at.clamp_min(GELU_DOWN), GELU_UP)
        return (
            norm(layer.down_proj.weight * slopes[:, None, :]) * norm(layer.up_proj.weight) * moved
        )

    def attention(self, layer: Any, x: Tensor, moved: Tensor) -> Tensor:
        """Bound attention: an average of values that move, and weights that move."""
        heads, root = layer.num_heads, math.sqrt(x.shape[-1] / layer.num_heads)
        q, k, v = (
            part(x).unflatten(-1, (heads, -1)).transpose(0, 1)
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        wq, wk, wv = (
            part.weight.unflatten(0, (heads, -1))
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        out = layer.o_proj.weight.unflatten(1, (heads, -1)).transpose(0, 1)
        share = (q @ k.mT / root).softmax(-1)
        near_q, near_k = (norm(weight)[:, None] * moved for weight in (wq, wk))
        # Only differences of logits within a row matter, so keys are relative to their mean under
        # the weights of the row.
        apart = (k[:, None] - (share @ k)[:, :, None]).norm(dim=-1)
        logit = (
            q.norm(dim=-1)[..., None] * near_k[:, None]
            + (apart + near_k[:, None]) * near_q[..., None]
        ) / root
        largest = logit.amax(-1)
        spread = (share * logit.square()).sum(-1).sqrt() * largest.exp()
        off = (v @ out.mT)[:, None] - (share @ v @ out.mT)[:, :, None]
        covariance = torch.einsum("hij,hijd,hije->hide", share, off, off)
        reach = torch.linalg.eigvalsh(covariance)[..., -1].clamp_min(0).sqrt() * largest.exp()
        average = torch.minimum(moved.max(), (2 * largest).exp() * (share @ moved))
        return (norm(out @ wv)[:, None] * average + spread * reach).sum(0)


def placed_norm(layer: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(
        x, layer.normalized_shape, layer.weight, layer.bias, layer.eps
    )


def radius(model: Any, x: Tensor, label: int) -> float:
    """Return the largest r (by bisection) proved to keep the label; 0 if it is wrong."""
    logits = model(inputs_embeds=x[None]).logits[0]
    weight = model.classifier.weight
    gaps = [
        (float(logits[label] - logits[k]), float((weight[label] - weight[k]).norm()))
        for k in range(len(logits))
    ]
    room = min(margin / size for margin, size in gaps if size > 0)
    bound = LocalBound(model, x)
    low, high = -30.0, 5.0
    if room <= 0 or bound.pooled(math.exp(low)) >= room:
        return 0.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if bound.pooled(math.exp(middle)) < room else (low, middle)
    return math.exp(low)


def is_broken(model: Any, x: Tensor, label: int, r: float, steps: int = 10) -> bool:
    """Return whether gradient descent on the margin changes the label with tokens within r."""
    moved = torch.zeros_like(x)
    for _ in range(steps):
        moved.requires_grad_()
        logits = model(inputs_embeds=(x + moved)[None]).logits[0]
        others = torch.cat((logits[:label], logits[label + 1 :]))
        if bool(others.max() > logits[label]):
            return True
        (gradient,) = torch.autograd.grad(logits[label] - others.max(), moved)
        moved = moved.detach() - gradient / gradient.norm(dim=-1, keepdim=True).clamp_min(
            1e-300
        ) * (r / 4)
        moved = moved * (r / moved.norm(dim=-1, keepdim=True).clamp_min(r))
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--examples", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for run in arguments.runs:
        config = read_config(run)
        task = build_task(config.task, {**config.task_options, "data": arguments.data})
        model = load_run_model(run)[0].double().eval().requires_grad_(False)
        rows = [task.collate([task.dataset("test")[index]]) for index in range(arguments.examples)]
        certificate = best_certificate(model, max(row["input_ids"].shape[-1] for row in rows))
        local, everywhere, broken, tokens = [], [], 0, []
        for row in rows:
            x, label = input_vectors(model, row["input_ids"])[0], int(row["labels"])
            sizes = x.norm(dim=-1)
            tokens += sizes.tolist()
            local.append(radius(model, x, label))
            logits = model(inputs_embeds=x[None]).logits
            near = certificate.radius(logits, row["labels"], largest_token=sizes.max()[None])
            everywhere.append(float(near))
            broken += local[-1] > 0 and is_broken(model, x, label, local[-1])
        token = statistics.median(tokens)
        right = [
            (mine, theirs)
            for mine, theirs in zip(local, everywhere, strict=True)
            if mine > 0 or theirs > 0
        ]
        mine, theirs = (statistics.median(pair[side] for pair in right) for side in (0, 1))
        certified = " / ".join(f"{share(local, size * token):.2f}" for size in (0.001, 0.01))
        print(
            f"{run.name}: {len(right)} of {len(rows)} correct; median radius local {mine:.3g} ="
            f" {mine / token:.2g} of a token, global {theirs:.3g} = {theirs / token:.2g}, ratio"
            f" {mine / max(theirs, 1e-300):.3g}; broken at the local radius {broken}; certified at"
            f" 0.001 / 0.01 of a token {certified}",
            flush=True,
        )


def share(radii: list[float], size: float) -> float:
    return sum(value > size for value in radii) / len(radii)


if __name__ == "__main__":
    main()
