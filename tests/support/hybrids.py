"""Small random models of families whose layers mix tokens in several ways: softmax attention beside linear
attention, state spaces, gated delta nets, recurrences or convolutions."""

from .many_families import model, rows_of

_TABLE = """
bailing_hybrid  BailingHybrid PLAIN moe_intermediate_size=16 num_experts=4 num_experts_per_token=2
                num_expert_group=1 topk_group=1 first_k_dense_replace=1 kv_lora_rank=8 qk_rope_head_dim=4
                v_head_dim=8 qk_nope_head_dim=8 q_lora_rank=8 linear_head_dim=8 linear_num_heads=4
                layer_types=["linear_attention","full_attention"] mlp_layer_types=["dense","sparse"]
bamba           Bamba GROUPED mamba_n_heads=8 mamba_d_head=8 mamba_d_state=4 attn_layer_indices=[1]
deepseek_v4     DeepseekV4 PLAIN moe_intermediate_size=16 num_key_value_heads=1 head_dim=8 q_lora_rank=8
                num_experts_per_tok=2 n_routed_experts=4 o_groups=2 o_lora_rank=8 index_n_heads=2
                index_head_dim=8 index_topk=4 qk_rope_head_dim=4 hc_mult=2 mlp_layer_types=["hash_moe","moe"]
                layer_types=["heavily_compressed_attention","compressed_sparse_attention"]
falcon_h1       FalconH1 GROUPED mamba_d_ssm=32 mamba_n_heads=4 mamba_d_head=8 mamba_d_state=4
falcon_mamba    FalconMamba SMALL state_size=4 num_hidden_layers=2
glm5_next_text  Glm5NextText PLAIN num_key_value_heads=4 moe_intermediate_size=16 n_routed_experts=4
                num_experts_per_tok=2 kv_lora_rank=8 q_lora_rank=8 v_head_dim=8 qk_nope_head_dim=8
                index_topk=4 index_head_dim=8 index_n_heads=2 linear_head_dim=8 linear_num_heads=4 hc_mult=2
                layer_types=["linear_attention","indexed_attention"] mlp_layer_types=["dense","sparse"]
                indexer_types=["full","full"] index_kpool=2
granitemoehybrid GraniteMoeHybrid GROUPED mamba_n_heads=8 mamba_d_head=8 mamba_d_state=4 num_local_experts=3
                num_experts_per_tok=2 shared_intermediate_size=24 layer_types=["linear_attention","full_attention"]
hrm_text        HrmText PLAIN num_hidden_layers=8 head_dim=8 num_layers_per_stack=1
inkling_text    InklingText GROUPED head_dim=8 swa_num_attention_heads=4 swa_num_key_value_heads=2
                swa_head_dim=8 sliding_window_size=4 d_rel=4 rel_extent=8 layer_types=["hybrid_sliding","hybrid"]
                mlp_layer_types=["dense","sparse"] moe_intermediate_size=16 n_routed_experts=4
                num_experts_per_tok=2 n_shared_experts=1
inkling2_text   Inkling2Text GROUPED head_dim=8 swa_num_attention_heads=4 swa_num_key_value_heads=2
                swa_head_dim=8 sliding_window_size=4 d_rel=4 rel_extent=8 layer_types=["hybrid_sliding","hybrid"]
                moe_intermediate_size=16 n_routed_experts=4 num_experts_per_tok=2 unpadded_vocab_size=40
                n_layers_per_attn_res_block=2
jamba           Jamba GROUPED attn_layer_period=2 attn_layer_offset=1 mamba_d_state=4 mamba_dt_rank=4
                num_experts=2 num_experts_per_tok=1
kimi_linear     KimiLinear PLAIN moe_intermediate_size=16 num_experts=4 num_experts_per_token=2 kv_lora_rank=8
                qk_rope_head_dim=4 v_head_dim=8 qk_nope_head_dim=8 linear_head_dim=8 linear_num_heads=4
                layer_types=["linear_attention","full_attention"] mlp_layer_types=["dense","sparse"]
lfm2            Lfm2 GROUPED layer_types=["conv","full_attention"]
lfm2_moe        Lfm2Moe GROUPED layer_types=["conv","full_attention"] moe_intermediate_size=16 num_experts=4
                num_experts_per_tok=2 num_dense_layers=1
lfm3            Lfm3 GROUPED head_dim=8 layer_types=["conv","full_attention"]
mamba           Mamba SMALL state_size=4 num_hidden_layers=2
mamba2          Mamba2 SMALL state_size=4 num_hidden_layers=2 num_heads=8 head_dim=8 n_groups=2
minimax         MiniMax GROUPED head_dim=8 num_local_experts=2 num_experts_per_tok=2 block_size=4
                layer_types=["linear_attention","full_attention"]
nemotron_h      NemotronH GROUPED head_dim=8 ssm_state_size=4 mamba_num_heads=8 mamba_head_dim=8 n_groups=2
                n_routed_experts=4 moe_intermediate_size=16 moe_shared_expert_intermediate_size=16
                layers_block_type=["linear_attention","full_attention","mlp","moe"]
olmo_hybrid     OlmoHybrid GROUPED DELTA layer_types=["linear_attention","full_attention"]
qwen3_5_text    Qwen3_5Text GROUPED DELTA head_dim=8 layer_types=["linear_attention","full_attention"]
qwen3_5_moe_text Qwen3_5MoeText GROUPED DELTA EXPERTS head_dim=8 layer_types=["linear_attention","full_attention"]
qwen3_next      Qwen3Next GROUPED DELTA EXPERTS head_dim=8 layer_types=["linear_attention","full_attention"]
qwen4_exp_text  Qwen4ExpText GROUPED DELTA EXPERTS head_dim=8 layer_types=["linear_attention","indexed_attention"]
                hc_count=2 hc_lowrank=4 ple_embed_dim=8 indexer_n_heads=2 indexer_kv_heads=1 indexer_head_dim=8
                indexer_budget=4 indexer_compress_ratio=2
recurrent_gemma RecurrentGemma GROUPED lru_width=32 block_types=["recurrent","attention"]
                attention_window_size=8 head_dim=8
rwkv            Rwkv SMALL num_hidden_layers=2 attention_hidden_size=32 intermediate_size=48 context_length=16
xlstm           xLSTM SMALL embedding_dim=32 num_hidden_layers=2 num_blocks=2 num_heads=4
zamba           Zamba PLAIN num_hidden_layers=4 num_key_value_heads=4 attention_hidden_size=64
                attention_head_dim=16 n_mamba_heads=2 mamba_d_state=4 mamba_dt_rank=4
                layers_block_type=["linear_attention","hybrid","linear_attention","hybrid"]
zamba2          Zamba2 PLAIN attention_hidden_size=64 attention_head_dim=16 n_mamba_heads=2 mamba_headdim=32
                mamba_d_state=4 adapter_rank=4 layers_block_type=["linear_attention","hybrid"] hybrid_layer_ids=[1]
zaya            Zaya GROUPED head_dim=8 moe_intermediate_size=16 num_experts=3 router_hidden_size=8
"""
"""Type of the model, class of transformers, sizes, and further options."""

_SHARED = {
    "DELTA": [
        "linear_num_key_heads=2",
        "linear_num_value_heads=4",
        "linear_key_head_dim=8",
        "linear_value_head_dim=8",
    ],
    "EXPERTS": [
        "num_experts=3",
        "num_experts_per_tok=2",
        "moe_intermediate_size=16",
        "shared_expert_intermediate_size=16",
    ],
}


def _written(words):
    return [option for word in words for option in _SHARED.get(word, [word])]


HYBRIDS = {name: model(*_written(words)) for name, *words in rows_of(_TABLE)}
