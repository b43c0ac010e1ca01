"""Studies of our own: what certificates, depth without normalisation and budgets cost and buy."""
