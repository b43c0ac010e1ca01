"""Models of transformers around given inputs: BERT, RoBERTa, DistilBERT and GPT-2 (notes B13, B22).

Layers, models and heads are described by the paths of their parts. The library is never imported;
its classes are known by name. The map goes from ``inputs_embeds`` to the last hidden state, or to
the logits of a head.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from wellposed.certification._as_called import LOCAL_ONLY, class_called, home_of, is_class
from wellposed.certification._curves import curve_of
from wellposed.certification._layer_bound import LayerBound, Refused
from wellposed.certification._rules_by_class import Rule, register_by_name
from wellposed.certification._walk import RuleContext
from wellposed.certification.rules._attention_weights import AttentionWeights, Slice, slices
from wellposed.certification.rules._blocks import of_one_vector, one_token
from wellposed.certification.rules._dot_product import on_the_ball, refuse_dropout
from wellposed.certification.rules._near import nearer
from wellposed.certification.rules._torch_layers import (
    GELU_SLOPES,
    GELU_TANH_SLOPES,
    SILU_SLOPES,
    Ends,
    activation_bound,
    affine_bound,
)

MODELS = "transformers.models"
_HEAD_DIMS = ("head_dim", "attention_head_size")


@dataclass(frozen=True, eq=False)
class LayerRule:
    """The rule of a layer, by the paths of its parts, several in one text."""

    parts: Mapping[str, str]
    """Modules that the rule reads by itself, and their classes."""
    attention: str
    projections: str
    """Queries, keys, values and output."""
    norms: str
    feedforward: str
    dropout: str
    """Dropout of the attention weights."""
    mixed: str = ""
    """Parts after the attention."""
    before: bool = False
    is_causal: bool = False
    refused: str = ""
    """An attribute that is true if the layer reads a second sequence."""

    def __call__(self, module: Any, context: RuleContext) -> LayerBound:
        _refuse_everywhere(context)
        if self.refused and getattr(module, self.refused, False):
            raise Refused("with cross-attention it maps two sequences")
        read_parts(module, context, self.parts)
        first, second = self.norms.split()
        feed = partial(_chain_of, module, self.feedforward)
        return context.layer(
            module, (first, partial(self._mixed, module)), (second, feed), before=self.before
        )

    def _mixed(self, module: Any, context: RuleContext) -> LayerBound:
        attention = module.get_submodule(self.attention)
        attended = context.record(
            attention, self.attention, self.attended(attention, module, context)
        )
        rest = context.after(attended).chain_of(module, self.mixed)
        return context.product([attended, rest])

    def attended(self, attention: Any, owner: Any, context: RuleContext) -> LayerBound:
        refuse_other_attention(attention)
        refuse_dropout(attention, attrgetter(self.dropout)(owner))
        if getattr(attention, "is_causal", self.is_causal) != self.is_causal:
            raise Refused("its mask is not that of its family; build it as an encoder")

        parts = _projections(attention, owner, self.projections, context)

        def read_weights() -> AttentionWeights:
            head_dim = next(
                getattr(attention, name) for name in _HEAD_DIMS if hasattr(attention, name)
            )
            weights = AttentionWeights.from_projections(*parts, head_dim=head_dim)
            return weights.with_longer_queries(float(attention.scaling) * math.sqrt(head_dim))

        weights = context.remember(attention, "AttentionWeights", read_weights)
        mask = "causal" if self.is_causal else "full"
        context = context.under_mask(mask)
        centre = context.centre_of(attention)
        if centre is not None and self.is_causal and centre.mask == "none":
            # Fused attention makes the causal mask by itself.
            centre = replace(centre, mask="causal")
        return nearer(on_the_ball(weights, context), weights, centre, context)


def _chain_of(module: Any, paths: str, context: RuleContext) -> LayerBound:
    return context.chain_of(module, paths)


@dataclass(frozen=True, eq=False)
class ModelRule:
    """The rule of a model without its head: tables whose rows are added, then parts in sequence."""

    chain: str
    parts: Mapping[str, str] = field(default_factory=dict)
    tables: str = ""
    pooler: str = ""
    """A pooler that the last hidden state does not pass."""

    def __call__(self, module: Any, context: RuleContext) -> LayerBound:
        _refuse_everywhere(context)
        present = {
            path: name for path, name in self.parts.items() if attrgetter(path)(module) is not None
        }
        read_parts(module, context, present)
        if self.pooler in present:
            context.reads(attrgetter(self.pooler)(module).activation)

        longest = 0.0
        for path in self.tables.split():
            table = attrgetter(path)(module)
            longest += context.remember(table, "longest row", partial(_longest, table))
        # A row of a table is added to each token, which moves it no farther.
        inside = replace(context, radius=context.radius + longest)
        return inside.chain_of(module, self.chain)


def _longest(table: nn.Embedding) -> float:
    return float(table.weight.detach().double().norm(dim=-1).max())


@dataclass(frozen=True, eq=False)
class HeadRule:
    """The rule of a model with its head: the body, one token of it if ``pooled``, parts of the head
    and the last linear map."""

    body: str
    last: str
    between: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    pooled: bool = True

    def __call__(self, module: Any, context: RuleContext) -> LayerBound:
        _refuse_everywhere(context)
        read_parts(module, context, self.parts)
        route = partial(self._route, module)
        return of_one_vector(route, context) if self.pooled else route(context)

    def _route(self, module: Any, context: RuleContext) -> LayerBound:
        bounds = [context.chain_of(module, self.body)]
        if self.pooled:
            token = one_token(context.after(bounds[0]))
            bounds.append(context.record(module, "pool", token))
        hidden = context.product(bounds)
        between = context.after(hidden).chain_of(module, self.between)
        before = context.product([hidden, between])
        context.set_head(module.get_submodule(self.last), before)
        return context.product([before, context.after(before).chain_of(module, self.last)])


def _refuse_everywhere(context: RuleContext) -> None:
    if math.isinf(context.moved):
        raise Refused(LOCAL_ONLY)


def read_parts(owner: Any, context: RuleContext, parts: Mapping[str, str]) -> None:
    """Vouch for parts that the rule of ``owner`` reads by itself, if each is of its family's class."""
    home = class_called(owner).__module__
    for path, name in parts.items():
        part = owner.get_submodule(path)
        if is_class(class_called(part), home, name):
            context.reads(part)


def _projections(module: Any, owner: nn.Module, paths: str, context: RuleContext) -> list[Any]:
    """Return the maps of queries, keys, values and output: apart, or cut out of one weight."""
    parts: list[Any] = [owner.get_submodule(path) for path in paths.split()]
    if len(parts) == 4:
        return parts

    for part in parts:
        if not is_class(class_called(part), "transformers.pytorch_utils", "Conv1D"):
            raise Refused(f"it reads a {type(part).__name__} in place of a Conv1D")
        context.reads(part)

    fused, output = parts
    sizes = [module.split_size] * 3
    if fused.weight.shape[1] != sum(sizes):
        raise Refused(
            f"its c_attn makes {fused.weight.shape[1]} numbers of a token, and its call cuts them into"
            f" {sizes}; set split_size so that these add up"
        )

    return [*slices(fused.weight.mT, fused.bias, sizes), Slice(output.weight.mT, output.bias)]


def refuse_other_attention(module: Any) -> None:
    """Refuse a call whose attention is not the one of transformers that bounds are proved for."""
    kind = module.config._attn_implementation
    source = sys.modules[class_called(module).__module__]
    homes = {
        "eager": (source.__name__, "eager_attention_forward"),
        "sdpa": ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
    }
    if kind not in homes:
        raise Refused(
            f"its attention runs as attn_implementation={kind!r}, and a bound is proved for eager and"
            " sdpa alone; load the model with attn_implementation='sdpa'"
        )

    run = source.ALL_ATTENTION_FUNCTIONS.get_interface(kind, source.eager_attention_forward)
    functions = [(f"{kind} attention", run, homes[kind])]
    if hasattr(source, "apply_chunking_to_forward"):
        name = "apply_chunking_to_forward"
        functions.append((name, getattr(source, name), ("transformers.pytorch_utils", name)))

    for what, function, home in functions:
        if home_of(function) != home:
            raise Refused(
                f"{'.'.join(home_of(function))} stands where transformers runs {what}; put its own back"
            )


def _conv1d(module: Any, context: RuleContext) -> LayerBound:
    """Bound a linear map whose weight is stored transposed."""
    weight = context.remember(module, "weight", lambda: module.weight.detach().mT)
    return affine_bound(weight, module.bias, context, lambda: module.weight.mT)


_ACTIVATIONS = {
    "GELUActivation": GELU_SLOPES, "GELUTanh": GELU_TANH_SLOPES, "NewGELUActivation": GELU_TANH_SLOPES,
    "FastGELUActivation": GELU_TANH_SLOPES, "AccurateGELUActivation": GELU_TANH_SLOPES,
    "SiLUActivation": SILU_SLOPES,
}  # fmt: skip


def _activation(ends: Ends) -> Rule:
    """Return the rule of an activation whose slopes lie between two numbers."""

    def rule(module: Any, context: RuleContext) -> LayerBound:
        if hasattr(module, "act") and curve_of(module) is None:
            return context.refuse(f"its act is {module.act!r}, not a GELU")
        return activation_bound(module, context, ends)

    return rule


register_by_name("transformers.pytorch_utils.Conv1D", _conv1d, sums=True)
for _name, _ends in _ACTIVATIONS.items():
    register_by_name(f"transformers.activations.{_name}", _activation(_ends), sums=True)


def register_family(family: str, **rules: Rule) -> None:
    for name, rule in rules.items():
        register_by_name(f"{MODELS}.{family}.modeling_{family}.{name}", rule)


def _bert(family: str, prefix: str, head: HeadRule) -> None:
    """Register BERT or RoBERTa: a LayerNorm on the embeddings and after every sublayer."""
    parts = {
        "attention": "Attention", "attention.self": "SelfAttention", "attention.output": "SelfOutput",
        "intermediate": "Intermediate", "output": "Output",
    }  # fmt: skip
    layer = LayerRule(
        parts={path: prefix + name for path, name in parts.items()},
        attention="attention.self",
        projections="attention.self.query attention.self.key attention.self.value"
        " attention.output.dense",
        mixed="attention.output.dropout",
        norms="attention.output.LayerNorm output.LayerNorm",
        feedforward="intermediate.dense intermediate.intermediate_act_fn output.dense output.dropout",
        dropout="attention.self.dropout.p",
        refused="add_cross_attention",
    )
    model = ModelRule(
        parts={path: prefix + path.capitalize() for path in ("embeddings", "encoder", "pooler")},
        tables="embeddings.position_embeddings embeddings.token_type_embeddings",
        chain="embeddings.LayerNorm embeddings.dropout encoder.layer.*",
        pooler="pooler",
    )
    names = {"Layer": layer, "Model": model, "ForSequenceClassification": head}
    register_family(family, **{prefix + name: rule for name, rule in names.items()})


_bert(
    "bert",
    "Bert",
    HeadRule(
        body="bert",
        parts={"bert.pooler": "BertPooler"},
        between="bert.pooler.dense bert.pooler.activation dropout",
        last="classifier",
    ),
)
# A tanh of slope 1 stands between dense and out_proj.
_bert(
    "roberta",
    "Roberta",
    HeadRule(
        body="roberta",
        parts={"classifier": "RobertaClassificationHead"},
        between="classifier.dropout classifier.dense classifier.dropout",
        last="classifier.out_proj",
    ),
)
register_family(
    "distilbert",
    TransformerBlock=LayerRule(
        parts={"attention": "DistilBertSelfAttention", "ffn": "FFN"},
        attention="attention",
        projections="attention.q_lin attention.k_lin attention.v_lin attention.out_lin",
        norms="sa_layer_norm output_layer_norm",
        feedforward="ffn.lin1 ffn.activation ffn.lin2 ffn.dropout",
        dropout="attention.dropout.p",
    ),
    DistilBertModel=ModelRule(
        parts={"embeddings": "Embeddings", "transformer": "Transformer"},
        tables="embeddings.position_embeddings",
        chain="embeddings.LayerNorm embeddings.dropout transformer.layer.*",
    ),
    # A ReLU, of slope 1, stands between pre_classifier and dropout.
    DistilBertForSequenceClassification=HeadRule(
        body="distilbert", between="pre_classifier dropout", last="classifier"
    ),
)
register_family(
    "gpt2",
    GPT2Block=LayerRule(
        parts={"attn": "GPT2Attention", "mlp": "GPT2MLP"},
        attention="attn",
        projections="attn.c_attn attn.c_proj",
        mixed="attn.resid_dropout",
        norms="ln_1 ln_2",
        feedforward="mlp.c_fc mlp.act mlp.c_proj mlp.dropout",
        dropout="attn.attn_dropout.p",
        before=True,
        is_causal=True,
        refused="crossattention",
    ),
    GPT2Model=ModelRule(tables="wpe", chain="drop h.* ln_f"),
    GPT2LMHeadModel=HeadRule(body="transformer", last="lm_head", pooled=False),
    # A linear map of every token, of which the last one is taken.
    GPT2ForSequenceClassification=HeadRule(body="transformer", last="score"),
)
