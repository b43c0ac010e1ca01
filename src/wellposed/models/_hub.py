"""Upload a model with a card that says what holds of it, in one commit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from wellposed.errors import ConfigError
from wellposed.models._card import card_text

BEGIN = "<!-- wellposed: begin -->"
END = "<!-- wellposed: end -->"
"""Lines around our part of a card; the rest is the author's, and stays."""


def model_card(
    model: PreTrainedModel,
    name: str,
    *,
    constraints: Any = (),
    certificate: Any = None,
    before: str = "",
) -> str:
    """Return ``README.md`` for a model: its sets and sizes, what is certified, how to load it.

    Status: errors of constraints are measured now; the certificate is checked to be of these weights.

    Args:
        model: a model of transformers or of wellposed.
        name: repository or folder, for the lines that load it.
        constraints: a handle of `wellposed.constrain_`, or several.
        certificate: the result of `wellposed.certify` for this model.
        before: an older card. Its text and header stay, and our part of it is replaced.

    Raises:
        ConfigError: no model of transformers; a handle or certificate of other weights.

    Cost: of measuring the errors, and a SHA-256 of the weights.

    >>> from wellposed.models import WellposedConfig, WellposedForCausalLM
    >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> card = model_card(WellposedForCausalLM(WellposedConfig(**sizes)), "me/small")
    >>> 'load_saved_model("me/small")' in card
    True
    """
    from huggingface_hub import ModelCard, ModelCardData

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model_card: expected a model of transformers, received {type(model).__name__}; for an"
            " adapter of PEFT use its own push_to_hub"
        )
    handles = constraints if isinstance(constraints, Sequence) else [constraints]
    ours = f"{BEGIN}\n{card_text(model, name, handles, certificate)}\n{END}"
    if not before:
        header = ModelCardData(library_name="transformers", tags=["wellposed"]).to_yaml()
        return f"---\n{header}\n---\n# {name.rpartition('/')[2]}\n\n{ours}\n"
    card: Any = ModelCard(before, ignore_metadata_errors=True)
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), "wellposed"]))
    card.data.library_name = card.data.library_name or "transformers"
    head, begun, rest = card.text.partition(BEGIN)
    tail = rest.partition(END)[2] if begun else ""
    card.text = f"{head.rstrip()}\n\n{ours}\n{tail.lstrip()}"
    return str(card)


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: Any = None,
    constraints: Any = (),
    certificate: Any = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload model, with its card",
) -> str:
    """Upload a model, its tokenizer and its `model_card` in one commit; return the commit's address.

    ``model.push_to_hub`` uploads the same weights, with a card that says nothing about them.

    Args:
        model: a model of transformers or of wellposed, constrained, read in windows or changed.
        repo_id: repository; made if there is none.
        tokenizer: a tokenizer or image processor to upload with it.
        constraints: as in `model_card`.
        certificate: as in `model_card`.
        private: whether a new repository is private; otherwise the hub's default, public.
        token: as in huggingface_hub; by default that of ``hf auth login``.
        revision: branch.
        create_pr: open a pull request instead.
        commit_message: title of the commit.

    Raises:
        ConfigError: as `model_card`, before anything is uploaded. Errors of the hub are its own.

    Cost: one upload of the saved files.

    >>> push_to_hub(model, "me/capped", tokenizer=tokenizer, constraints=handle)  # doctest: +SKIP
    """
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    described = {"constraints": constraints, "certificate": certificate}
    model_card(model, repo_id, **described)  # refuses before a repository is made
    api = HfApi(token=token)
    cards: Any = ModelCard
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    try:
        before = str(cards.load(repo_id, token=token, ignore_metadata_errors=True))
    except (EntryNotFoundError, RepositoryNotFoundError):
        before = ""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        card = model_card(model, repo_id, before=before, **described)
        (Path(folder) / "README.md").write_text(card, encoding="utf-8")
        where: Any = {"revision": revision, "create_pr": create_pr}
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=commit_message, **where
        )
    return str(commit.pr_url or commit.commit_url)
