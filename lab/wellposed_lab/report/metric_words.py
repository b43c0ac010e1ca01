"""Metrics of ``result.json`` in words: their names, splits and radii."""

from __future__ import annotations

SPLITS = {"train": "training", "valid": "validation", "test": "test", "monitor": "worst"}
_METRIC_WORDS = {
    "bleu": "BLEU",
    "f1": "F1",
    "loss": "loss (nats)",
    "logit_max": "attention logit",
    "entropy": "attention entropy, relative to its maximum",
    "update": "update over weight",
    "kurtosis": "kurtosis of activations",
    "nats_per_char": "nats per character",
    "bits_per_char": "bits per character",
}


def metric_words(metric: str) -> str:
    """Return a metric of ``result.json`` in words.

    >>> [metric_words(name) for name in ("accuracy,valid", "loss,test", "certified@0.1,test", "bits_per_byte")]
    ['validation accuracy', 'test loss (nats)', 'test accuracy certified at radius 0.1', 'bits per
    byte']
    """
    name, _, split = metric.partition(",")
    kind, _, radius = name.partition("@")
    words = _METRIC_WORDS.get(name, name.replace("_", " "))
    if kind == "certified" and radius:
        words = f"accuracy certified at radius {radius}"
    if kind == "words" and radius:
        words = f"accuracy certified against any {radius} word{'s' * (radius != '1')}"
    return f"{SPLITS.get(split, split)} {words}" if split else words
