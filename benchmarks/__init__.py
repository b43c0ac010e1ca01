"""Measured rows: ours beside others, turn by turn in one process. `python -m benchmarks --list`
names them."""
