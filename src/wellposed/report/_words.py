"""Metrics in plain words."""

from __future__ import annotations

SPLITS = {"train": "training", "valid": "validation", "test": "test"}
_NAMES = {"bleu": "BLEU", "f1": "F1", "loss": "loss (nats)", "nats_per_char": "nats per character"}
_NAMES |= {"bits_per_char": "bits per character"}


def metric_words(metric: str) -> str:
    """Return a metric of ``result.json`` as a reader says it.

    >>> [metric_words(name) for name in ("accuracy,valid", "loss,test", "certified@0.1,test", "bits_per_byte")]
    ['validation accuracy', 'test loss (nats)', 'test accuracy certified at radius 0.1', 'bits per
    byte']
    """
    name, _, split = metric.partition(",")
    kind, _, radius = name.partition("@")
    words = (
        f"accuracy certified at radius {radius}" if kind == "certified" and radius else _plain(name)
    )
    return f"{SPLITS.get(split, split)} {words}" if split else words


def _plain(name: str) -> str:
    return _NAMES.get(name, name.replace("_", " "))
