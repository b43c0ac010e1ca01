"""``wellposed predict`` for a language model: the text and what the model adds to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wellposed.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Return ``text`` and at most ``max_new_tokens`` more tokens, sampled, or the most probable at
    temperature 0.

    Raises:
        ConfigError: the text is empty.
        ShapeError: the tokenizer makes no token of it.
    """
    import torch

    if not text:
        raise ConfigError(
            "wellposed predict: --text is empty; a language model needs at least one character to"
            " continue"
        )
    torch.manual_seed(seed)
    ids = tokenizer([text], return_tensors="pt", add_special_tokens=False)["input_ids"]
    if not ids.numel():
        raise ShapeError(
            f"wellposed predict: the tokenizer, a {type(tokenizer).__name__}, makes no token of"
            f" {text[:40]!r}; give another text, or the tokenizer that belongs to the model"
        )
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    )
    wanted = ids.shape[1] + max_new_tokens
    positions = int(getattr(model.config, "max_position_embeddings", 0) or 0) or wanted
    while ids.shape[1] < wanted:
        # The model sees at most `positions` tokens: past them it goes on from the last half of what
        # it can see.
        window = ids if ids.shape[1] < positions else ids[:, -max(1, positions // 2) :]
        count = min(wanted - ids.shape[1], positions - window.shape[1])
        with torch.inference_mode():
            out = model.generate(  # type: ignore[operator]
                input_ids=window,
                attention_mask=torch.ones_like(window),
                max_new_tokens=count,
                **sampling,
            )
        added = out[:, window.shape[1] :]
        ids = torch.cat([ids, added], dim=1)
        if added.shape[1] < count:  # an end-of-text token
            break
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
