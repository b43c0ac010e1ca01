"""The published data sets, as far as they are at hand: counts, vocabularies, labels."""

import pytest

from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import build_task

pytestmark = pytest.mark.data


def sizes(task):
    return [len(task.dataset(split)) for split in SPLITS]


PUBLISHED = {
    "listops/d20s_train.tsv.gz": ("listops", {}, [8000, 1000, 1000], 10),
    "listops/d8_test.tsv.gz": ("listops", {}, [9000, 500, 500], 10),
    "ag_news": ("text_classification", {"tokenizer": "byte"}, [9000, 1000, 3800], 4),
    "ag_news/": ("retrieval", {"num_train": 2000, "max_length": 256}, [2000, 1000, 3800], 2),
    "cifar10_subset": ("image", {}, [10000, 1000, 2000], 10),
}


@pytest.mark.parametrize("data", PUBLISHED)
def test_published_sets_have_their_sizes_and_labels(shared_data, data):
    """Labels of ListOps are those of every expression, or the task would have refused the file."""
    name, options, expected, labels = PUBLISHED[data]
    task = build_task(name, {"data": str(shared_data / data), **options})
    assert (sizes(task), task.model_kwargs()["num_labels"]) == (expected, labels)
