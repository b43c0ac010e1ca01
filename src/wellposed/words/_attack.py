"""Attacks on the words of a text: greedy or beam search over proposed edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Propose = Callable[[Tensor, int], Sequence[Tensor]]
"""(token ids of a text, target class) -> texts with one more edit."""
_AT_ONCE = 512


def logits_of(model: Any, **inputs: Tensor) -> Tensor:
    """Return the logits of a batch on the CPU, from a model on any device."""
    device = next(model.parameters()).device
    moved = {name: value.to(device) for name, value in inputs.items()}
    return model(**moved).logits.cpu()


@dataclass(frozen=True)
class WordAttack:
    """Searches for the fewest edits of a text that change its class from the label.

    Status: empirical, an upper bound of the fewest edits. Each round keeps for each class the
    ``beam`` texts in which it is furthest ahead (Li et al. 2016, Kuleshov et al. 2018).

    Args:
        model: Takes ``input_ids`` and ``attention_mask``, and returns ``logits``.
        propose: The edits, `WordSwaps` or your own function.

    Cost: ``classes x beam`` calls of propose per round, each with a batch of forward passes.
    """

    model: Any
    propose: Propose
    beam: int = 1

    @torch.no_grad()
    def fewest_edits(self, ids: Tensor, label: int, most: int) -> tuple[int, Tensor]:
        """Return the number of edits that an attack on ``(tokens,)`` needs, and the text it makes.
        It is 0 if the answer is wrong already; ``most + 1`` with the text itself if it fails."""
        ahead = self._ahead([ids], label)
        if float(ahead.max()) > 0:
            return 0, ids

        best = (most + 1, ids)
        for target in range(ahead.shape[1]):
            beam = [ids]
            # A class that needs as many edits as the best so far is skipped.
            for count in range(1, best[0] if target != label else 0):
                tried = [text for start in beam for text in self.propose(start, target)]
                if not tried:
                    break
                ahead = self._ahead(tried, label)
                if bool((ahead.amax(1) > 0).any()):
                    best = (count, tried[int(ahead.amax(1).argmax())])
                    break
                places = ahead[:, target].topk(min(self.beam, len(tried))).indices.tolist()
                beam = [tried[index] for index in places]

        return best

    def _ahead(self, texts: Sequence[Tensor], label: int) -> Tensor:
        """Return how far each class is ahead of the label in each text; -inf for the label."""
        logits = []
        for start in range(0, len(texts), _AT_ONCE):
            batch = list(texts[start : start + _AT_ONCE])
            ids = nn.utils.rnn.pad_sequence(batch, batch_first=True)
            lengths = torch.tensor([len(text) for text in batch])
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            logits.append(logits_of(self.model, input_ids=ids, attention_mask=mask.long()))
        scores = torch.cat(logits)
        ahead = scores - scores[:, label, None]
        ahead[:, label] = -torch.inf
        return ahead


@dataclass(frozen=True)
class WordSwaps:
    """Proposes the replacements of one word by any of the vocabulary that a gradient ranks first.

    Word w at position i gains ``g_i . (e_w - e_i)``, g the gradient of a difference of two logits
    (HotFlip, Ebrahimi et al. 2018): exact for linear logits. A position is changed once.

    Args:
        model: Takes ``inputs_embeds``.
        vectors: The ``inputs_embeds`` of every word, (vocabulary, width).
        original: The attacked text.
        label: Its class.
        tries: Positions that are proposed.
    """

    model: Any
    vectors: Tensor
    original: Tensor
    label: int
    tries: int = 8

    @cached_property
    def _table(self) -> Tensor:
        return self.vectors.float()

    def __call__(self, ids: Tensor, target: int) -> Sequence[Tensor]:
        """Return texts with one more word changed."""
        with torch.enable_grad():
            x = self.vectors[ids][None].requires_grad_()
            mask = torch.ones_like(ids)[None]
            (logits,) = logits_of(self.model, inputs_embeds=x, attention_mask=mask)
            (gradient,) = torch.autograd.grad(logits[target] - logits[self.label], x)

        along = gradient[0].float() @ self._table.mT
        current = along.gather(1, ids[:, None])
        gains, words = (along - current).max(1)
        gains[ids != self.original] = -torch.inf
        places = gains.topk(min(self.tries, len(ids))).indices
        swapped = ids.repeat(len(places), 1)
        swapped[torch.arange(len(places)), places] = words[places]

        return list(swapped[gains[places].isfinite()])
