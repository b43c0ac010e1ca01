"""Slopes of a map between inputs of a ball, by ascent in float64."""

import torch


def tok(x):
    """Return the largest 2-norm of a token of each input."""
    return (x.unsqueeze(1) if x.ndim == 2 else x).norm(dim=-1).amax(-1)


def inside(moved, radius):
    """Return moves whose tokens are cut to the radius."""
    return moved * (radius / moved.norm(dim=-1, keepdim=True).clamp_min(radius))


def steepest(function, centre, radius, steps, copies=8):
    """Ascend the slope between two inputs whose tokens are within the radius of the centre's."""
    base = centre.repeat_interleave(copies, 0)
    generator = torch.Generator().manual_seed(1)
    free = torch.randn(2, *base.shape, generator=generator, dtype=torch.float64)
    free[1] = free[0] + 0.1 * free[1]
    free.requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.1, maximize=True)
    best = torch.zeros(len(base), dtype=torch.float64)
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = (base + inside(part * radius, radius) for part in free)
        slope = tok(function(x) - function(y)) / tok(x - y)
        best = torch.maximum(best, slope.detach())
        slope.log().sum().backward()
        optimizer.step()
    return float(best.max())
