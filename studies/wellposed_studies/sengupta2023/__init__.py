"""Sengupta et al. (2023), "Manifold-Preserving Transformers" (TransJect)."""
