"""The three sets of McGrath (2024) at toy size."""

import random

WORDS = ["good", "bad", "film", "cat", "dog", "sits", "runs", "who", "what", "where", "old", "new"]


def write_minbert(folder):
    """Write forty rows of each set, and twenty-four dev rows, in which the label can be read off
    the words."""
    draw = random.Random(0)

    def words():
        return " ".join(draw.choices(WORDS, k=5))

    for split, count in (("train", 40), ("dev", 24)):
        sst = []
        para = []
        sts = []
        for index in range(count):
            text = words()
            other = words()
            sst.append(f"{index}\tx\t{text}\t{min(4, text.count('good') * 2)}")
            para.append(f"{index}\tx\t{text}\t{text if index % 2 else other}\t{float(index % 2)}")
            shared = len(set(text.split()) & set(other.split()))
            sts.append(f"{index}\tx\t{text}\t{other}\t{min(5, shared):.1f}")
        for name, label, rows in (
            ("ids-sst", "sentiment", sst),
            ("quora", "is_duplicate", para),
            ("sts", "similarity", sts),
        ):
            columns = "sentence" if name == "ids-sst" else "sentence1\tsentence2"
            table = [f"\tid\t{columns}\t{label}", *rows]
            (folder / f"{name}-{split}.csv").write_text("\n".join(table) + "\n")
    return folder
