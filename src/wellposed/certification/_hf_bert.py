"""Rules of BERT, RoBERTa, DistilBERT, the encoder of BART: a LayerNorm on the embeddings and after
every sublayer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wellposed.certification._bounds import LayerBound
from wellposed.certification._hf import (
    MODELS,
    attention,
    feedforward,
    linear_head,
    picked_token,
    read,
    shifted,
)
from wellposed.certification._rules import Site, register_rule
from wellposed.certification._transformer import named, normed, of_one_vector

DISTILBERT = f"{MODELS}.distilbert.modeling_distilbert"


def register_bert(family: str, prefix: str, head: Callable[[Any, Site], LayerBound]) -> None:
    """Register the classes of one family; ``head`` bounds its classifier."""
    source = f"{MODELS}.{family}.modeling_{family}"

    @register_rule(f"{source}.{prefix}Layer")
    def _layer(module: Any, site: Site) -> LayerBound:
        for path, name in (
            ("attention", "Attention"),
            ("intermediate", "Intermediate"),
            ("output", "Output"),
        ):
            read(module, path, prefix + name, site)
        if module.add_cross_attention:
            return site.refuse("with cross-attention it maps two sequences")
        heads = read(module, "attention.self", f"{prefix}SelfAttention", site)
        output = read(module, "attention.output", f"{prefix}SelfOutput", site)

        def mixed(at: Site) -> LayerBound:
            projections = (heads.query, heads.key, heads.value, output.dense)
            return attention(
                module, "attention.self", at, lambda: projections, "attention.output.dropout",
                dropout=heads.dropout.p, causal=heads.is_causal,
            )  # fmt: skip

        def fed(at: Site) -> LayerBound:
            activation = "intermediate.intermediate_act_fn"
            return feedforward(
                module, at, "intermediate.dense", activation, "output.dense", "output.dropout"
            )

        return normed(
            module,
            site,
            ("attention.output.LayerNorm", mixed),
            ("output.LayerNorm", fed),
            before=False,
        )

    @register_rule(f"{source}.{prefix}Model")
    def _model(module: Any, site: Site) -> LayerBound:
        embeddings = read(module, "embeddings", f"{prefix}Embeddings", site)
        read(module, "encoder", f"{prefix}Encoder", site)
        if module.pooler is not None:
            # Beside the map: the last hidden state does not pass it.
            site.reads(read(module, "pooler", f"{prefix}Pooler", site).activation)
        inside = shifted(site, embeddings.position_embeddings, embeddings.token_type_embeddings)
        layers = (f"encoder.layer.{index}" for index in range(len(module.encoder.layer)))
        return inside.chain(named(module, "embeddings.LayerNorm", "embeddings.dropout", *layers))

    @register_rule(f"{source}.{prefix}ForSequenceClassification")
    def _classifier(module: Any, site: Site) -> LayerBound:
        return of_one_vector(partial(head, module), site)


def _head(module: Any, site: Site, body: str, between: tuple[str, ...], last: str) -> LayerBound:
    before = picked_token(module, body, site)
    pooled = site.at_radius(before[-1].out_radius).chain(named(module, *between))
    return linear_head(module, last, site, [*before, pooled])


def _bert_head(module: Any, site: Site) -> LayerBound:
    read(module, "bert.pooler", "BertPooler", site)
    return _head(
        module,
        site,
        "bert",
        ("bert.pooler.dense", "bert.pooler.activation", "dropout"),
        "classifier",
    )


def _roberta_head(module: Any, site: Site) -> LayerBound:
    read(module, "classifier", "RobertaClassificationHead", site)
    # Its dropout stands twice, and a tanh of slope 1 between dense and out_proj.
    between = ("classifier.dropout", "classifier.dense", "classifier.dropout")
    return _head(module, site, "roberta", between, "classifier.out_proj")


register_bert("bert", "Bert", _bert_head)
register_bert("roberta", "Roberta", _roberta_head)


@register_rule(f"{DISTILBERT}.TransformerBlock")
def _distilbert_block(module: Any, site: Site) -> LayerBound:
    heads = read(module, "attention", "DistilBertSelfAttention", site)
    read(module, "ffn", "FFN", site)

    def mixed(at: Site) -> LayerBound:
        projections = (heads.q_lin, heads.k_lin, heads.v_lin, heads.out_lin)
        return attention(
            module,
            "attention",
            at,
            lambda: projections,
            dropout=heads.dropout.p,
        )

    def fed(at: Site) -> LayerBound:
        return feedforward(module, at, "ffn.lin1", "ffn.activation", "ffn.lin2", "ffn.dropout")

    return normed(module, site, ("sa_layer_norm", mixed), ("output_layer_norm", fed), before=False)


@register_rule(f"{DISTILBERT}.DistilBertModel")
def _distilbert(module: Any, site: Site) -> LayerBound:
    embeddings = read(module, "embeddings", "Embeddings", site)
    read(module, "transformer", "Transformer", site)
    layers = (f"transformer.layer.{index}" for index in range(len(module.transformer.layer)))
    return shifted(site, embeddings.position_embeddings).chain(
        named(module, "embeddings.LayerNorm", "embeddings.dropout", *layers)
    )


@register_rule(f"{DISTILBERT}.DistilBertForSequenceClassification")
def _distilbert_classifier(module: Any, site: Site) -> LayerBound:
    # A ReLU, of slope 1, stands between pre_classifier and dropout.
    between = ("pre_classifier", "dropout")
    return of_one_vector(lambda at: _head(module, at, "distilbert", between, "classifier"), site)


def register_bart(family: str, prefix: str, positions: str, *norms: str) -> None:
    """Register the encoder of one family; ``norms`` stand on the sum of embeddings and
    positions."""
    source = f"{MODELS}.{family}.modeling_{family}"

    @register_rule(f"{source}.{prefix}EncoderLayer")
    def _layer(module: Any, site: Site) -> LayerBound:
        heads = read(module, "self_attn", f"{prefix}Attention", site)
        if module.training:
            return site.refuse(
                "its dropout is drawn without a module of its own in train mode; call eval()"
            )

        def mixed(at: Site) -> LayerBound:
            projections = (heads.q_proj, heads.k_proj, heads.v_proj, heads.out_proj)
            return attention(
                module,
                "self_attn",
                at,
                lambda: projections,
                dropout=heads.dropout,
            )

        def fed(at: Site) -> LayerBound:
            return feedforward(module, at, "fc1", "activation_fn", "fc2")

        return normed(
            module, site, ("self_attn_layer_norm", mixed), ("final_layer_norm", fed), before=False
        )

    @register_rule(f"{source}.{prefix}Encoder")
    def _encoder(module: Any, site: Site) -> LayerBound:
        if module.training:
            return site.refuse("it drops layers and values in train mode; call eval()")
        read(module, "embed_tokens", f"{prefix}ScaledWordEmbedding", site)
        table = read(module, "embed_positions", positions, site)
        layers = (f"layers.{index}" for index in range(len(module.layers)))
        return shifted(site, table).chain(named(module, *norms, *layers))


register_bart("bart", "Bart", "BartLearnedPositionalEmbedding", "layernorm_embedding")
register_bart("marian", "Marian", "MarianSinusoidalPositionalEmbedding")
