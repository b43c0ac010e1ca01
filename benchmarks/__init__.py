"""Measured rows: ours and others in alternation, in one process; see `--list`."""
