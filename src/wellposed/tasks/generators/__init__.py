"""Data that is drawn, not read: each example is a function of rules and a seed."""
