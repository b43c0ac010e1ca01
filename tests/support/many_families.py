"""Small random models of many families, most of which no file of the library names."""

from types import MappingProxyType

import torch
import transformers as hf

PLAIN = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    vocab_size=40,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
SMALL = dict(vocab_size=40, hidden_size=32)
GPT = dict(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=64)
VISION = dict(image_size=16, patch_size=8, num_channels=3)
SEQ2SEQ = dict(
    vocab_size=40,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
)
GROUPED = PLAIN | dict(num_key_value_heads=2)


def model(family, sizes=MappingProxyType({}), **options):
    """Return what builds a model of transformers: its class without Model and Config, and its sizes."""

    def build():
        torch.manual_seed(0)
        config = getattr(hf, f"{family}Config")
        return getattr(hf, f"{family}Model")(config(**{**sizes, **options})).eval()

    return build


FAMILIES = {
    "modernbert": model("ModernBert", PLAIN, global_attn_every_n_layers=2, local_attention=8),
    "deberta-v2": model(
        "DebertaV2",
        PLAIN,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=8,
        share_att_key=True,
    ),
    "electra": model("Electra", PLAIN, embedding_size=16),
    "albert": model("Albert", PLAIN, embedding_size=16),
    "xlm-roberta": model("XLMRoberta", PLAIN),
    "mpnet": model("MPNet", PLAIN),
    "qwen3": model("Qwen3", GROUPED, head_dim=8),
    "qwen2": model("Qwen2", GROUPED),
    "mistral": model("Mistral", GROUPED),
    "gemma": model("Gemma", GROUPED, head_dim=8),
    "gemma2": model("Gemma2", GROUPED, head_dim=8),
    "gemma3": model("Gemma3Text", GROUPED, head_dim=8),
    "olmo2": model("Olmo2", GROUPED),
    "smollm3": model("SmolLM3", GROUPED),
    "mixtral": model("Mixtral", GROUPED, num_local_experts=3, num_experts_per_tok=2),
    "qwen3-moe": model(
        "Qwen3Moe",
        GROUPED,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    ),
    "gpt-oss": model("GptOss", GROUPED, head_dim=8, num_local_experts=3, num_experts_per_tok=2),
    "gpt-neox": model("GPTNeoX", PLAIN),
    "gpt-neo": model(
        "GPTNeo",
        SMALL,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        intermediate_size=48,
        max_position_embeddings=64,
    ),
    "gpt-j": model("GPTJ", GPT, rotary_dim=4),
    "opt": model("OPT", PLAIN, ffn_dim=48, word_embed_proj_dim=32),
    "bloom": model("Bloom", SMALL, n_layer=2, n_head=4),
    "falcon": model(
        "Falcon",
        SMALL,
        num_hidden_layers=2,
        num_attention_heads=4,
        multi_query=True,
        new_decoder_architecture=False,
    ),
    "falcon-grouped": model(
        "Falcon",
        SMALL,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "mpt": model(
        "Mpt", vocab_size=40, d_model=32, n_layers=2, n_heads=4, expansion_ratio=2, max_seq_len=64
    ),
    "phi": model("Phi", PLAIN),
    "granite": model("Granite", GROUPED),
    "cohere": model("Cohere", GROUPED),
    "stablelm": model("StableLm", GROUPED),
    "starcoder2": model("Starcoder2", GROUPED),
    "gpt-bigcode": model("GPTBigCode", GPT),
    "deepseek-v3": model(
        "DeepseekV3",
        PLAIN,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=10,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=20,
        n_shared_experts=1,
    ),
    "whisper": model(
        "Whisper", SEQ2SEQ, num_mel_bins=8, max_source_positions=8, max_target_positions=16
    ),
    "pegasus": model("Pegasus", SEQ2SEQ),
    "clip-text": model("CLIPText", PLAIN),
    "clip-vision": model("CLIPVision", PLAIN | VISION),
    "dinov2": model(
        "Dinov2", VISION, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2
    ),
    "swin": model(
        "Swin",
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=2,
        image_size=16,
        patch_size=4,
    ),
    "deit": model("DeiT", PLAIN | VISION),
    "beit": model("Beit", PLAIN | VISION),
    "t5": model(
        "T5",
        vocab_size=40,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        decoder_start_token_id=0,
    ),
    "mbart": model("MBart", SEQ2SEQ),
    "blenderbot": model("Blenderbot", SEQ2SEQ),
    "squeezebert": model("SqueezeBert", PLAIN, embedding_size=32),
    "funnel": model(
        "Funnel",
        vocab_size=40,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=48,
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    "xlnet": model("XLNet", vocab_size=40, d_model=32, n_layer=2, n_head=4, d_inner=48),
    "longformer": model("Longformer", PLAIN, attention_window=4),
    "esm": model("Esm", PLAIN, position_embedding_type="rotary", mask_token_id=3),
    "llama4": model(
        "Llama4Text",
        GROUPED,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        interleave_moe_layer_step=1,
    ),
    "nemotron": model("Nemotron", GROUPED),
    "glm4": model("Glm4", GROUPED, head_dim=8),
    "persimmon": model("Persimmon", PLAIN),
    "perceiver": model(
        "Perceiver",
        num_latents=4,
        d_latents=32,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
    ),
    "olmoe": model("Olmoe", GROUPED, num_experts=3, num_experts_per_tok=2),
    "segformer": model(
        "Segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
}

BATCHES = {
    "perceiver": lambda: {"inputs": torch.randn(1, 6, 16)},
    "segformer": lambda: {"pixel_values": torch.randn(1, 3, 16, 16)},
    "whisper": lambda: {
        "input_features": torch.randn(1, 8, 16),
        "decoder_input_ids": torch.arange(3, 11)[None],
    },
}
"""Inputs of models whose configuration does not describe them."""


def batch_of(name, model):
    """Return a batch for a model of a family."""
    if name in BATCHES:
        return BATCHES[name]()
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(1, 3, model.config.image_size, model.config.image_size)}
    batch = {"input_ids": torch.arange(3, 11)[None]}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    return batch


UNSEEN = "affinities cannot be seen in attention that runs neither scaled_dot_product_attention"
EXPERTS = "only some tokens go through an expert"
GATED = "a gated feed-forward network is a product of three weights"
NO_ROLE = "weights match no role, so the rule does not say what to do with them"
VERBS = ("find_roles", "penalize", "constrain", "measure", "affinity", "t_fixup")
REFUSED = {
    ("gpt-oss", "affinity"): UNSEEN,  # its softmax has a column more, the sink
    ("funnel", "affinity"): UNSEEN,  # its queries are pooled, so that weights are not square
    ("longformer", "affinity"): UNSEEN,  # its softmax is over windows
    **{("squeezebert", verb): "no attention or feed-forward weight was recognised" for verb in VERBS},
    ("xlnet", "find_roles"): "an attention call: its query, key, value, output is no product with one parameter",
    ("xlnet", "penalize"): "the model has no such weight",
    ("xlnet", "constrain"): "no weight of the model plays the role query, key",
    ("xlnet", "affinity"): "no self-attention module was found",
    ("albert", "t_fixup"): "weights shared between layers have no T-Fixup rule",
    **{
        (name, "t_fixup"): EXPERTS
        for name in ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3", "llama4", "olmoe")
    },
    **{
        (name, "t_fixup"): GATED
        for name in (
            "modernbert", "qwen3", "qwen2", "mistral", "gemma", "gemma2", "gemma3", "olmo2", "smollm3", "granite",
            "cohere", "stablelm", "glm4",
        )
    },
    **{
        (name, "t_fixup"): NO_ROLE
        for name in (
            "whisper", "clip-vision", "dinov2", "swin", "deit", "beit", "xlnet", "longformer", "perceiver",
        )
    },
    **dict.fromkeys(
        [("funnel", "t_fixup"), ("segformer", "t_fixup")],
        "T-Fixup is for one stack of layers, or an encoder and the decoder that reads it",
    ),
}  # fmt: skip
"""Limits of each verb, with a part of the message."""


def verbs_table():
    """Return what each verb does with each family as Markdown, from the truth that tests hold."""
    reasons = list(dict.fromkeys(REFUSED.values()))

    def cell(name, verb):
        reason = REFUSED.get((name, verb))
        return "yes" if reason is None else f"no ({reasons.index(reason) + 1})"

    lines = [("family", *(f"`{verb}`" for verb in VERBS)), ("---",) * (1 + len(VERBS))]
    lines += [(name, *(cell(name, verb) for verb in VERBS)) for name in FAMILIES]
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes])
