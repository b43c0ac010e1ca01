"""Kim, Papamakarios, Mnih (2021), "The Lipschitz Constant of Self-Attention"."""
