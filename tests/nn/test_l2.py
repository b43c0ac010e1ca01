"""`L2SelfAttention`: its first weights, one token, what its builders make of a configuration."""
