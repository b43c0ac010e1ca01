"""The methods of `frontier/methods` on a classifier that is trained from scratch."""

from __future__ import annotations

from wellposed_studies.frontier.method_data import CLASSIFIER, read_labelled
from wellposed_studies.frontier.methods import DIFFERENCE, GATE, RIVALS, judge, table_of_methods
from wellposed_studies.recipe import Reproduction, Request, recipe
from wellposed_studies.study import Sizes, sizes_at
from wellposed_studies.verdicts import Power


def sizes_of(request: Request) -> Sizes:
    return sizes_at(request, "frontier/classifiers")


@recipe(
    "frontier/classifiers",
    folders=("ag_news",),
    takes=("data", "minutes"),
    power=Power(
        sizes_of, DIFFERENCE, 0.012, "three seeds of AdamW and Muon", tests=len(RIVALS), gate=GATE
    ),
    builtin="sentences about code or networks that ship with Python",
)
def classifiers(request: Request) -> Reproduction:
    """Ways to train a classifier with constrained weights, each at its own best rate.

    Claim: a claim of ours, written before the runs: some method of this table ends at a lower loss than
        AdamW and Muon at their best rates.
    Test: that of frontier/methods, on the loss of the labels of valid.
    Note: AG News, our Transformer with the mean of the tokens, words as tokens, from scratch; rates,
        seeds, schedule, cold and deep as in frontier/methods. The medium scale has the size of MiniLM,
        6 layers of width 384, for a GPU.
    Note: the loss is the least of four evaluations, since 9,000 texts are soon learned by heart.
    """
    sizes = sizes_of(request)
    texts = read_labelled(request.data, sizes.limit, sizes.seq_len)
    return table_of_methods(request, "frontier/classifiers", sizes, texts, (CLASSIFIER,), judge)
