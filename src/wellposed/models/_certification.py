"""How `wellposed.certify` reads our models: from ``inputs_embeds`` to hidden states or logits.

Perturbations act on ``inputs_embeds``, before any factor ``sqrt(D)`` on the embeddings. So an
attack and a certificate refer to the same input. ``radius`` bounds a row of ``inputs_embeds``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellposed import certification
from wellposed.certification import LayerBound, RuleContext, register_rule
from wellposed.models import _families as families
from wellposed.models._heads import Classifier, LanguageHead, PairHead, TokenHead
from wellposed.models._init import first_pool, max_pool, mean_pool
from wellposed.models._transject import TransJectModel
from wellposed.models._wellposed import Embeddings, WellposedModel
from wellposed.nn import BallEmbedding, UnitEmbedding


def embedding_radius(model: nn.Module) -> float:
    """Return ``max_v |E_v|_2``, the ``radius`` that covers every input from a tokenizer.

    Exact, float64, without perturbation: add the size of the perturbation to be certified.

    >>> from wellposed.models import WellposedConfig
    >>> embedding_radius(WellposedModel(WellposedConfig(hidden_size=8, num_attention_heads=2))) > 0
    True
    """
    table = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    if isinstance(table, (UnitEmbedding, BallEmbedding)):
        return 1.0
    # Rows are multiplied by the table itself (BART), or by the model that uses it (Marian).
    scale = max(abs(float(getattr(part, "embed_scale", 0.0))) for part in model.modules()) or 1.0
    return scale * float(table.weight.detach().double().norm(dim=-1).max())


def input_vectors(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Return the ``inputs_embeds`` that give the same output as ``input_ids``, (batch, tokens,
    width).

    Exact. For TransJect that is X^0, position codes included; else the rows of the token embedding.

    >>> from wellposed.models import TransJectConfig
    >>> model = TransJectModel(TransJectConfig(hidden_size=8)).eval()
    >>> input_vectors(model, torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 8])
    """
    body = getattr(model, "base_model", model)
    if isinstance(body, TransJectModel):
        options = {"attention_mask": attention_mask, "output_hidden_states": True}
        return body(input_ids=input_ids, **options).hidden_states[0]
    scale = getattr(getattr(body, "encoder", body), "embed_scale", 1.0)
    return scale * model.get_input_embeddings()(input_ids)  # pyright: ignore[reportCallIssue]


@register_rule(TransJectModel)
def _transject(module: TransJectModel, context: RuleContext) -> LayerBound:
    """Map X^0 (this model's ``inputs_embeds``, after its embeddings) to X^L."""
    for part in module.embeddings.modules():
        context.reads(part)
    return context.child(module.stack, "stack")


@register_rule(WellposedModel, sums=True)
def _body(module: WellposedModel, context: RuleContext) -> LayerBound:
    context = context.under_mask("causal" if module.is_causal else "full")
    embeddings = module.embeddings
    context.reads(embeddings, Embeddings)
    # The map starts after the tokens; positions are read as they are called.
    token = cast(nn.Embedding, embeddings.token)
    context.reads(token)
    context.reads(embeddings.position)
    # e -> s (e + P): the positions only shift, but they enlarge the ball.
    with torch.no_grad():
        places = torch.arange(module.config.max_position_embeddings, device=token.weight.device)
        largest = float(embeddings.position(places).double().norm(dim=-1).max())

    scale = float(embeddings.scale)
    form = "scale of the embeddings"
    radius = scale * (context.radius + largest)
    bound = LayerBound(scale, form, "exact", out_radius=radius, skip=scale)
    embedded = context.record(embeddings, "embeddings", bound)
    dropout = context.after(embedded).child(embeddings.dropout, "embeddings.dropout")
    rest = context.after(embedded).after(dropout).chain_of(module, "layers.* final_norm")
    return context.product([embedded, dropout, rest])


@register_rule(families.TransJectForCausalLM)
@register_rule(families.TransJectForMaskedLM)
@register_rule(families.TransJectForTokenClassification)
@register_rule(families.WellposedForCausalLM)
@register_rule(families.WellposedForMaskedLM)
@register_rule(families.WellposedForTokenClassification)
def _token_head(module: TokenHead, context: RuleContext) -> LayerBound:
    if isinstance(module, LanguageHead) and module.gain is not None:
        return context.refuse("no bound is known for the learnt factors of its logits (logit_gain)")
    paths, last = type(module).chain.rsplit(maxsplit=1)
    before = context.chain_of(module, paths)
    head = context.child(module.get_submodule(last), last, radius=before.out_radius)
    context.set_head(module.get_submodule(last), before)
    return context.product([before, head])


@register_rule(families.TransJectForSequencePairClassification)
@register_rule(families.WellposedForSequencePairClassification)
@register_rule(families.TransJectForSequenceClassification)
@register_rule(families.WellposedForSequenceClassification, sums=True)
def _classifier(module: Classifier, context: RuleContext) -> LayerBound:
    return certification.of_one_vector(partial(_classifier_route, module), context)


def _classifier_route(module: Any, context: RuleContext) -> LayerBound:
    body = context.child(module.model, "model")
    pooling = _POOLINGS.get(module.pool)
    if pooling is None:
        name = getattr(module.pool, "__name__", repr(module.pool))
        return context.refuse(f"no bound is known for the pooling {name}; known: mean, first, max")

    pooled = context.record(module, "pool", pooling(context.after(body)))
    parts = [body, pooled]
    if isinstance(module, families.WellposedForSequenceClassification):
        parts.append(context.child(module.dropout, "dropout", radius=pooled.out_radius))

    before = context.product(parts)
    head = context.child(module.classifier, "classifier", radius=before.out_radius)
    if math.isinf(head.lipschitz):
        return context.product([before, head])

    if isinstance(module.classifier, PairHead):
        # Read the head again for the part before its last linear map.
        within = context.in_norm(context.norm).at_radius(before.out_radius)
        hidden = before_output(module.classifier, within)
        context.set_head(module.classifier.output, context.product([before, hidden]))
    else:
        skip = body.skip * parts[-1].skip if pooling is certification.mean_pooling else None
        context.set_head(module.classifier, before, skip=skip)

    return context.product([before, head])


def _max(context: RuleContext) -> LayerBound:
    """In tok, each coordinate may come from another token: sqrt(min(n, D)), with D unknown here."""
    most = math.sqrt(context.seq_len)
    bound = most if context.norm == "tok" else 1.0
    return LayerBound(bound, "largest of each coordinate", out_radius=most * context.radius)


_POOLINGS: Any = {mean_pool: certification.mean_pooling, max_pool: _max}
_POOLINGS[first_pool] = certification.one_token


def before_output(head: PairHead, context: RuleContext) -> LayerBound:
    """Bound the input of a head's last linear map if both vectors move within the radius."""
    ball = context.child(head.projection, "projection")
    if not math.isfinite(ball.out_radius):
        return context.refuse_without_ball(
            "two inputs meet in a product a*b, without a global bound"
        )

    radius = ball.out_radius
    dropout = context.child(head.dropout, "dropout", radius=radius)
    if dropout.lipschitz > 1:
        # The forms of B12 need parts of the features that cancel; dropout drops each separately.
        return context.refuse("dropout on the features of two inputs is active; call eval()")

    grown = context.spectral_norm(head.hidden.weight) * radius
    reach = grown * math.sqrt(6.0 + radius * radius) / head.divisor
    bias = 0.0 if head.hidden.bias is None else float(head.hidden.bias.detach().double().norm())
    slope = _slope(head, context, radius) / head.divisor
    joint = LayerBound(slope, "both vectors move (B12)", out_radius=reach + bias)
    hidden = context.record(head.hidden, "hidden", joint)
    active = context.child(head.activation, "activation", radius=hidden.out_radius)
    return context.product([ball, dropout, hidden, active])


@torch.no_grad()
def _slope(head: PairHead, context: RuleContext, radius: float) -> float:
    """Bound ``(a, b) -> W_1 [a, b, a*b, a-b]`` on a ball by the smallest of the forms of B12."""
    weight = head.hidden.weight.detach()
    first, second, product, difference = weight.double().chunk(4, dim=1)
    linear = torch.cat((first + difference, second - difference), dim=1)
    margin = 1.0 + 1e-9
    if context.norm == "inf":
        return margin * float((linear.abs().sum(1) + 2.0 * radius * product.norm(dim=1)).max())

    longest = float(product.norm(dim=0).max())
    if context.norm == 2:
        apart = context.spectral_norm(linear) + math.sqrt(2.0) * radius * longest
        joint = context.spectral_norm(weight) * math.sqrt(3.0 + 2.0 * radius * radius)
        return margin * min(apart, joint)

    apart = sum(map(context.spectral_norm, linear.chunk(2, dim=1)))
    halves = min(math.sqrt(2.0) * context.spectral_norm(linear), apart)
    joint = context.spectral_norm(weight) * math.sqrt(6.0 + 4.0 * radius * radius)
    return margin * min(halves + 2.0 * radius * longest, joint)


@register_rule(PairHead)
def _pair_head(module: PairHead, context: RuleContext) -> LayerBound:
    before = before_output(module, context)
    return context.product(
        [before, context.child(module.output, "output", radius=before.out_radius)]
    )
