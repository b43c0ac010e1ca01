"""The card of a model: what it is, its constraints, its certificate, and how to load it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import transformers

from wellposed.errors import ConfigError, shortened
from wellposed.model_edits import attention_of, recorded
from wellposed.models._loading import auto_class, reads_images
from wellposed.models._windows import WindowsForSequenceClassification
from wellposed.version import __version__

AS_IT_IS = """from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")"""
WITH_OUR_LOADER = """from transformers import AutoTokenizer
from wellposed.models import load_saved_model

model = load_saved_model("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")"""
ENCODED = """
from wellposed.words import WordCertificate

batch = tokenizer.pad({"input_ids": WordCertificate(model, tokenizer).encode(texts)}, return_tensors="pt")
logits = model(**batch).logits"""
NOTE = "Without this import, a plain `from_pretrained` refuses the `wellposed` entries of `config.json`."
NOTE_ON_NORMS = (
    "**A plain `from_pretrained` gives another model**, without a warning: it adds {lost} LayerNorms"
    " with fresh weights. `config.json` records their removal under `wellposed`, and the loader"
    " above repeats it."
)
NOT_KEPT = (
    "These are ordinary weights: nothing keeps them in their sets after loading. To train on, call"
    " `constrain_` again."
)
NOT_A_BOUND = "Constraints of single matrices are no Lipschitz bound of the model."


def loading_lines(model: Any, name: str) -> list[str]:
    """Return the section of a card that loads a model from a folder or repository ``name``."""
    norms = recorded(model.config).get("removed_norms")
    code = WITH_OUR_LOADER
    if norms:
        note = NOTE_ON_NORMS.format(lost=len(norms))
    elif _is_ours(model) or attention_of(model.config) is not None:
        note = NOTE
    else:
        code = AS_IT_IS
        note = ""

    if reads_images(model):
        code = code.replace("AutoTokenizer", "AutoImageProcessor").replace("tokenizer", "processor")
    auto = getattr(auto_class(type(model).__name__), "__name__", type(model).__name__)
    code = code.format(auto=auto, name=name)
    if isinstance(model, WindowsForSequenceClassification):
        code += f"\n{ENCODED}"
    lines = ["## How to load it", f"```python\n{code}\n```"]
    return [*lines, note] if note else lines


def card_text(
    model: Any, name: str, constraints: Sequence[Any] = (), certificate: Any = None
) -> str:
    """Return the text of a card, without its header.

    Raises:
        ConfigError: the certificate is of other weights, or a handle constrains another model.
    """
    weights = sum(weight.numel() for weight in model.parameters())
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()})
    facts = [
        f"- class: `{type(model).__name__}`, {weights:,} parameters, {', '.join(dtypes)}",
        f"- made with: wellposed {__version__}, transformers {transformers.__version__}",
    ]
    attention = attention_of(model.config)
    if attention is not None:
        facts.append(f"- attention: `{attention}` instead of dot-product attention")
    parts = ["\n".join(facts), *_constrained(model, constraints), *_certified(model, certificate)]
    return "\n\n".join([*parts, *loading_lines(model, name)])


def _constrained(model: Any, constraints: Sequence[Any]) -> list[str]:
    """Return the table of sets, with errors that are measured now."""
    if not constraints:
        return ["## Constraints", "None are recorded with these weights."]
    parameters = {id(weight) for weight in model.parameters()}
    rows = ["| set | size | weights | largest error when uploaded |", "|---|---|---|---|"]
    for handle in constraints:
        if any(id(weight.parameter) not in parameters for weight in handle.weights):
            raise ConfigError(
                f"model_card: a constraint of {handle.paths[0]} is of another model than this"
                f" {type(model).__name__}; give the handles that constrain_ returned for it"
            )
        sizes = sorted({row.size for row in handle.report.rows})
        size = f"{sizes[0]:.4g}" if len(sizes) == 1 else f"{sizes[0]:.4g} to {sizes[-1]:.4g}"
        paths = [f"`{path}`" for path in handle.paths]
        kind = type(handle.weights[0].set).__name__.lower()
        worst = handle.error().worst
        rows.append(f"| {kind} | {size} | {len(paths)}: {shortened(paths)} | {worst:.2g} |")

    return ["## Constraints", "\n".join(rows), f"{NOT_KEPT} {NOT_A_BOUND}"]


def _certified(model: Any, certificate: Any) -> list[str]:
    """Return what is certified, and what is not."""
    lines = ["## Certificate"]
    if isinstance(model, WindowsForSequenceClassification):
        lines.append(
            "Replacing k words of a text changes only the votes of their windows, so"
            " `WordCertificate` counts how many replaced words cannot change an answer (theory note"
            " B15). Certified: answers to replaced words, text by text. Not certified: inserted or"
            " removed words, and that the answer is right."
        )

    if certificate is None:
        return [*lines, "No Lipschitz bound comes with this model."]
    certificate.require_weights_of(model)
    if not math.isfinite(certificate.total):
        names = [f"`{layer.path or '.'}` ({layer.module})" for layer in certificate.uncertified]
        return [*lines, f"No Lipschitz bound: none is known for {shortened(names)}."]

    scope = f"norm {certificate.norm}, at most {certificate.tokens} tokens, {certificate.domain}"
    bound = f"Lipschitz bound {certificate.total:.4g} ({certificate.label}): {scope}"
    useless = f" {certificate.reason}." if certificate.reason else ""
    return [
        *lines,
        f"{bound}, of the embedded input.{useless}",
        f"It is of these weights as stored (SHA-256 `{certificate.weights[:16]}`), in exact"
        " arithmetic. Not certified: rounding of the forward pass, longer inputs, changed weights.",
    ]


def _is_ours(model: Any) -> bool:
    return type(model).__module__.startswith("wellposed.")
