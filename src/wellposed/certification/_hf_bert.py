"""Rules of BERT, RoBERTa and DistilBERT: a LayerNorm on the embeddings and after every sublayer (theory note B13)."""

from __future__ import annotations

from functools import partial
from typing import Any

from wellposed.certification._blocks import function_bound
from wellposed.certification._hf import MODELS, attention, longest_row, named, read
from wellposed.certification._rules import LayerBound, Site, product_of, register_rule
from wellposed.certification._transformer import of_one_vector, one_token, sublayer

DISTILBERT = f"{MODELS}.distilbert.modeling_distilbert"


def register_bert(family: str, prefix: str, head: Any) -> None:
    """Register the classes of one family; ``head`` bounds a classifier's head from the last hidden state on."""
    source = f"{MODELS}.{family}.modeling_{family}"

    @register_rule(f"{source}.{prefix}Layer")
    def _layer(module: Any, site: Site) -> LayerBound:
        for path, name in (("attention", "Attention"), ("intermediate", "Intermediate"), ("output", "Output")):
            read(module, path, prefix + name, site)
        if module.add_cross_attention:
            return site.refuse("with cross-attention it maps two sequences")
        first = sublayer(
            site, partial(_attention, module, prefix), after=named(module, "attention.output.LayerNorm")[0]
        )
        second = sublayer(
            site.at_radius(first.out_radius), partial(_feedforward, module), after=named(module, "output.LayerNorm")[0]
        )
        return product_of([first, second], radius=second.out_radius)

    @register_rule(f"{source}.{prefix}Model")
    def _model(module: Any, site: Site) -> LayerBound:
        embeddings = read(module, "embeddings", f"{prefix}Embeddings", site)
        read(module, "encoder", f"{prefix}Encoder", site)
        if module.pooler is not None:
            read(module, "pooler", f"{prefix}Pooler", site)
        shift = longest_row(embeddings.position_embeddings, embeddings.token_type_embeddings)
        layers = (f"encoder.layer.{index}" for index in range(len(module.encoder.layer)))
        return site.at_radius(site.radius + shift).chain(
            named(module, "embeddings.LayerNorm", "embeddings.dropout", *layers)
        )

    @register_rule(f"{source}.{prefix}ForSequenceClassification")
    def _classifier(module: Any, site: Site) -> LayerBound:
        return of_one_vector(lambda at: head(module, at), site)


def _attention(module: Any, prefix: str, site: Site) -> LayerBound:
    heads = read(module, "attention.self", f"{prefix}SelfAttention", site)
    output = read(module, "attention.output", f"{prefix}SelfOutput", site)
    found = attention(
        heads,
        site,
        lambda: (heads.query, heads.key, heads.value, output.dense),
        heads=heads.num_attention_heads,
        dropout=heads.dropout.p,
        causal=heads.is_causal,
    )
    mixed = site.record(heads, "attention.self", found)
    rest = site.at_radius(mixed.out_radius).chain(named(module, "attention.output.dropout"))
    return product_of([mixed, rest], radius=rest.out_radius)


def _feedforward(module: Any, site: Site) -> LayerBound:
    up = site.chain(named(module, "intermediate.dense"))
    inner = function_bound(
        module.intermediate.intermediate_act_fn, site.at_radius(up.out_radius), "intermediate.intermediate_act_fn"
    )
    rest = site.at_radius(inner.out_radius).chain(named(module, "output.dense", "output.dropout"))
    return product_of([up, inner, rest], radius=rest.out_radius)


def _bert_head(module: Any, site: Site) -> LayerBound:
    body = site.chain(named(module, "bert"))
    pooler = read(module.bert, "pooler", "BertPooler", site)
    token = site.record(pooler, "pool", one_token(site.at_radius(body.out_radius)))
    pooled = site.at_radius(token.out_radius).chain(
        named(module, "bert.pooler.dense", "bert.pooler.activation", "dropout")
    )
    return _linear_head(module, "classifier", site, [body, token, pooled])


def _roberta_head(module: Any, site: Site) -> LayerBound:
    body = site.chain(named(module, "roberta"))
    head = read(module, "classifier", "RobertaClassificationHead", site)
    token = site.record(head, "pool", one_token(site.at_radius(body.out_radius)))
    # Its dropout stands twice, and a tanh of slope 1 between dense and out_proj.
    pooled = site.at_radius(token.out_radius).chain(
        named(module, "classifier.dropout", "classifier.dense", "classifier.dropout")
    )
    return _linear_head(module, "classifier.out_proj", site, [body, token, pooled])


def _distilbert_head(module: Any, site: Site) -> LayerBound:
    body = site.chain(named(module, "distilbert"))
    token = site.record(module, "pool", one_token(site.at_radius(body.out_radius)))
    # A ReLU, of slope 1, stands between pre_classifier and dropout.
    pooled = site.at_radius(token.out_radius).chain(named(module, "pre_classifier", "dropout"))
    return _linear_head(module, "classifier", site, [body, token, pooled])


def _linear_head(module: Any, path: str, site: Site, before: list[LayerBound]) -> LayerBound:
    body = site.product(before)
    site.set_head(module.get_submodule(path).weight, body)
    return site.product([body, site.at_radius(body.out_radius).chain(named(module, path))])


register_bert("bert", "Bert", _bert_head)
register_bert("roberta", "Roberta", _roberta_head)


@register_rule(f"{DISTILBERT}.TransformerBlock")
def _distilbert_block(module: Any, site: Site) -> LayerBound:
    heads = read(module, "attention", "DistilBertSelfAttention", site)
    feedforward = read(module, "ffn", "FFN", site)

    def mixed(at: Site) -> LayerBound:
        projections = (heads.q_lin, heads.k_lin, heads.v_lin, heads.out_lin)
        found = attention(heads, at, lambda: projections, heads=heads.n_heads, dropout=heads.dropout.p)
        return at.record(heads, "attention", found)

    def fed(at: Site) -> LayerBound:
        up = at.chain(named(module, "ffn.lin1"))
        inner = function_bound(feedforward.activation, at.at_radius(up.out_radius), "ffn.activation")
        rest = at.at_radius(inner.out_radius).chain(named(module, "ffn.lin2", "ffn.dropout"))
        return product_of([up, inner, rest], radius=rest.out_radius)

    first = sublayer(site, mixed, after=("sa_layer_norm", module.sa_layer_norm))
    second = sublayer(
        site.at_radius(first.out_radius), fed, after=("output_layer_norm", module.output_layer_norm)
    )  # fmt: skip
    return product_of([first, second], radius=second.out_radius)


@register_rule(f"{DISTILBERT}.DistilBertModel")
def _distilbert(module: Any, site: Site) -> LayerBound:
    embeddings = read(module, "embeddings", "Embeddings", site)
    read(module, "transformer", "Transformer", site)
    layers = (f"transformer.layer.{index}" for index in range(len(module.transformer.layer)))
    return site.at_radius(site.radius + longest_row(embeddings.position_embeddings)).chain(
        named(module, "embeddings.LayerNorm", "embeddings.dropout", *layers)
    )


@register_rule(f"{DISTILBERT}.DistilBertForSequenceClassification")
def _distilbert_classifier(module: Any, site: Site) -> LayerBound:
    return of_one_vector(partial(_distilbert_head, module), site)
