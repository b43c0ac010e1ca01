"""What classifiers of all families share: pooled vectors, and the loss of labels."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from wellposed.models._config import WellposedConfig
from wellposed.models._embeddings import padding_of
from wellposed.models._heads import Head, Output
from wellposed.models._pooling import POOLINGS
from wellposed.models._transject_config import TransJectConfig


class Classifier(Head[Output]):
    """A head that pools the states of a sequence, over its real tokens, and maps vectors to `num_labels` logits."""

    def add_pool(self, config: WellposedConfig | TransJectConfig) -> None:
        """Set the pool and the number of labels."""
        self.loss_type = "ForSequenceClassification"
        self.num_labels = config.num_labels or 2
        self.pool = POOLINGS.get(config.pooling)

    def pooled(self, input_ids: Tensor | None, attention_mask: Tensor | None, **given: Any) -> tuple[Tensor, Any]:
        """Return one vector per sequence, (batch, width), and the output of the body."""
        output = self.run_body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **given)
        hidden = cast(Tensor, output.last_hidden_state)
        return self.pool(hidden, padding_of(attention_mask, hidden.shape[0], hidden.shape[1])), output

    def label_loss(self, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        """Return cross-entropy, binary cross-entropy or squared error, as transformers chooses; None without labels."""
        if labels is None:
            return None
        model = cast(Any, self)
        labels = labels.to(logits.dtype) if self.num_labels == 1 else labels
        return model.loss_function(labels=labels, pooled_logits=logits, config=model.config)
