"""CPU time of a step of a method over plain AdamW, for `frontier/methods`."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from wellposed_studies.frontier.emulated_products import bfloat16_products
from wellposed_studies.frontier.method_data import Training
from wellposed_studies.frontier.method_runs import Started, start
from wellposed_studies.frontier.training_methods import BASELINES

if TYPE_CHECKING:
    from wellposed_studies.frontier.method_data import Batch, Data

WARM = 3
"""Steps before the first that counts: states of optimizers are made in them."""
COUNTED = 15


def cpu_ratio(training: Training, data: Data) -> float:
    """Return the CPU time of a step of a method over that of AdamW on the same model and batches.

    The steps of both alternate in one process, and their medians are compared.
    """
    products = bfloat16_products()
    both = [
        replace(start(one, data), products=products)
        for one in (training, replace(training, method=BASELINES[0]))
    ]
    longer = replace(training, steps=max(training.steps, WARM + COUNTED))
    read = itertools.islice(data.batches(longer), WARM + COUNTED)
    pairs = [[_seconds(one, number, batch) for one in both] for number, batch in enumerate(read)]
    of_method, of_plain = zip(*pairs[WARM:], strict=True)
    return median(of_method) / median(of_plain)


def _seconds(started: Started, number: int, batch: Batch) -> float:
    begun = time.process_time()
    started.step(number, batch)
    return time.process_time() - begun
