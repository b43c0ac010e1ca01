"""A small table of films, good and bad."""

import random


def write_films(path, good="good"):
    """Write 80 labelled texts of four words, whose third tells the label."""
    rng = random.Random(0)
    kinds = {"pos": good, "neg": "bad"}
    rows = [f"{label}\ta {kinds[label]} film {rng.choice('xyz')}\n" for label in kinds]
    path.write_text("".join(["label\ttext\n", *rows * 40]), encoding="utf-8")
    return path
