"""Attacks on the words of a text: greedy, or a beam of the best, over proposed changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Propose = Callable[[Tensor, int], Sequence[Tensor]]
"""(token ids of a text, class to reach) -> texts that one more edit makes of it."""
_AT_ONCE = 512


def logits_of(model: Any, **inputs: Tensor) -> Tensor:
    """Return the logits of a batch, which lies on the CPU as they do, wherever the model is."""
    device = next(model.parameters()).device
    given = {name: value.to(device) for name, value in inputs.items()}
    return model(**given).logits.cpu()


@dataclass(frozen=True)
class WordAttack:
    """Looks for the fewest edits of a text that make a classifier give another class than the label.

    Empirical: what it finds is an upper bound of the fewest edits. From the text on, each round
    tries what `propose` gives for each class in turn, and keeps the ``beam`` texts on which that
    class is furthest ahead of the label (greedy word replacement: Li et al. 2016, Kuleshov et al.
    2018).

    Args:
        model: a classifier that takes ``input_ids`` and ``attention_mask`` and gives ``logits``.
        propose: the edits, `WordSwaps` or one's own.
        beam: texts that are kept for each class.

    Cost: ``classes x beam`` calls of propose and as many batches of forward passes in each round.
    """

    model: Any
    propose: Propose
    beam: int = 1

    @torch.no_grad()
    def fewest_edits(self, ids: Tensor, label: int, most: int) -> tuple[int, Tensor]:
        """Return how many edits of a text, (tokens,), the attack needs, and the text it makes;
        ``most + 1`` and the text itself where it finds none up to ``most``, 0 where the answer is
        wrong already."""
        ahead = self._ahead([ids], label)
        if float(ahead.max()) > 0:
            return 0, ids
        found = (most + 1, ids)
        for target in range(ahead.shape[1]):
            kept = [ids]
            # A class that needs no fewer edits than another one is of no interest.
            for count in range(1, found[0] if target != label else 0):
                tried = [text for each in kept for text in self.propose(each, target)]
                if not tried:
                    break
                ahead = self._ahead(tried, label)
                if bool((ahead.amax(1) > 0).any()):
                    found = (count, tried[int(ahead.amax(1).argmax())])
                    break
                best = ahead[:, target].topk(min(self.beam, len(tried))).indices.tolist()
                kept = [tried[place] for place in best]
        return found

    def _ahead(self, texts: Sequence[Tensor], label: int) -> Tensor:
        """How far each class is ahead of the label in each text; the label itself never is."""
        found = []
        for start in range(0, len(texts), _AT_ONCE):
            some = list(texts[start : start + _AT_ONCE])
            ids = nn.utils.rnn.pad_sequence(some, batch_first=True)
            lengths = torch.tensor([len(text) for text in some])
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            found.append(logits_of(self.model, input_ids=ids, attention_mask=mask.long()))
        logits = torch.cat(found)
        ahead = logits - logits[:, label, None]
        ahead[:, label] = -torch.inf
        return ahead


@dataclass(frozen=True)
class WordSwaps:
    """Proposes, of every replacement of one word by any of the vocabulary, those that a gradient
    ranks first.

    The gain of word w at position i is ``g_i . (e_w - e_i)``, g the gradient of the difference of
    two logits (HotFlip, Ebrahimi et al. 2018): exact where logits are linear in the words, so that
    the attack is exact too. A position is changed once.

    Args:
        model: takes ``inputs_embeds``.
        vectors: (vocabulary, width), the ``inputs_embeds`` of every word.
        original, label: the text that is attacked, and its class.
        tries: positions that are proposed.
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
        """Return the texts with one more word changed."""
        with torch.enable_grad():
            x = self.vectors[ids][None].requires_grad_()
            mask = torch.ones_like(ids)[None]
            (logits,) = logits_of(self.model, inputs_embeds=x, attention_mask=mask)
            (gradient,) = torch.autograd.grad(logits[target] - logits[self.label], x)
        along = gradient[0].float() @ self._table.mT
        own = along.gather(1, ids[:, None])
        gains, words = (along - own).max(1)
        gains[ids != self.original] = -torch.inf
        places = gains.topk(min(self.tries, len(ids))).indices
        swapped = ids.repeat(len(places), 1)
        swapped[torch.arange(len(places)), places] = words[places]
        return list(swapped[gains[places].isfinite()])
