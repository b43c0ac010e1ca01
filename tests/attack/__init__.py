"""Attack what `certify` accepts: random compositions, inputs and weights ascended; ``python -m tests.attack``."""
