"""What tasks with one label an example share: accuracy, and the most frequent label as the
reference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from wellposed.tasks.task import Split, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class LabelTask(Task):
    """A task with one label an example.

    ``accuracy`` is the share of examples whose largest logit is on the label. The reference is the
    share of the most frequent label of valid, which no constant answer beats.
    """

    headline: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    labels: tuple[str, ...]
    """Names of the labels."""

    @abstractmethod
    def split_labels(self, split: Split) -> NDArray[np.integer]:
        """Return the label of every example of a split, by number."""

    def model_kwargs(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }

    def metric_sums(
        self, logits: Tensor, batch: Mapping[str, Tensor]
    ) -> dict[str, tuple[float, float]]:
        from wellposed.tasks.kinds.objectives import accuracy_sums

        return {"accuracy": accuracy_sums(logits, batch["labels"])}

    def summarize(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        correct, count = totals["accuracy"]
        return {"accuracy": correct / count}

    def reference(self) -> dict[str, float]:
        """Return the share of valid's most frequent label."""
        import numpy as np

        counts = np.bincount(self.split_labels("valid"))
        return {"accuracy": float(counts.max() / counts.sum())}

    def label_counts(self, split: Split) -> dict[str, int]:
        """Return how many examples of a split have each label."""
        import numpy as np

        counts = np.bincount(self.split_labels(split), minlength=len(self.labels))
        return dict(zip(self.labels, counts.tolist(), strict=True))
