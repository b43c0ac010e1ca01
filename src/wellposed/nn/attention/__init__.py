"""Self- and cross-attention: dot product, L2, cosine, and on the unit ball."""
