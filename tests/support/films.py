"""A small table of films, good and bad."""

import random


def write_films(path, good="good"):
    """Write 80 labelled texts of four words, whose third tells the label."""
    rng = random.Random(0)
    rows = [
        f"{label}\ta {word} film {rng.choice('xyz')}\n"
        for label, word in (("pos", good), ("neg", "bad"))
    ]
    path.write_text("".join(["label\ttext\n", *rows * 40]), encoding="utf-8")
    return path
