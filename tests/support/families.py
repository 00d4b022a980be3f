"""Tiny configs of many transformers families, one table for the tests that go through all
of them.
"""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedModel

# Settings by the names that most families use; what a family does not know is left out.
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
PAIR = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "d_model": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
PICTURE = {"image_size": 32, "patch_size": 8, "num_labels": 5}

TWO = {
    "text_config": SMALL | {"projection_dim": 16},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    },
}


def same(names: str, **settings) -> dict[str, dict]:
    """Families that differ from the others by these ``settings``."""
    return {name: settings for name in names.split()}


TEXT = (
    same("""
        llama qwen2 qwen3 gemma phi phi3 olmo olmo2 cohere glm glm4 helium smollm3 stablelm
        starcoder2 nemotron persimmon gpt2 gpt_neox gpt_bigcode bloom biogpt openai-gpt seed_oss
        ernie4_5 arcee apertus diffllama modernbert-decoder nanochat
    """)
    | same("mistral gemma2 gemma3_text olmo3 cohere2 exaone4", sliding_window=8)
    | same("gptj codegen", rotary_dim=4)
    | {
        "granite": {"logits_scaling": 2.0},
        "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "falcon": {"head_dim": None},
        "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
        "ctrl": {"dff": 48},
    }
)
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
MIXTURES = same("mixtral qwen3_moe olmoe phimoe granitemoe minimax") | {
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "gpt_oss": {"sliding_window": 8},
    "deepseek_v3": ROUTED
    | {
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
    "jetmoe": {"kv_channels": 8},
    "llama4_text": {"attention_chunk_size": 8},
    "dots1": ROUTED | {"n_shared_experts": 1},
}
MAMBA_2 = {"mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
STATES = same("mamba falcon_mamba", state_size=4) | {
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "jamba": {"mamba_d_state": 4},
    "zamba2": {
        "layer_types": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
        "mamba_d_state": 4,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
    },
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "bamba": MAMBA_2,
    "falcon_h1": MAMBA_2 | {"mamba_d_ssm": 64},
    "lfm2": {},
}
GROUPS = ("q", "k", "v", "post_attention", "intermediate", "output")
MASKED = (
    same("""
        bert roberta deberta deberta-v2 modernbert mpnet camembert xlm-roberta fnet big_bird
        nystromformer rembert megatron-bert esm
    """)
    | same("albert electra convbert roformer", embedding_size=16)
    | {
        "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        "squeezebert": {"embedding_size": 32} | {f"{part}_groups": 1 for part in GROUPS},
        "xlnet": {
            "max_position_embeddings": None,
            "d_model": 32,
            "n_layer": 2,
            "n_head": 4,
            "d_inner": 48,
        },
        "longformer": {"attention_window": 8},
    }
)
PAIRS = (
    same("t5 mt5 umt5 longt5", **T5)
    | same("bart mbart pegasus marian blenderbot plbart", **PAIR)
    | {
        "led": PAIR
        | {
            "attention_window": 8,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
        "switch_transformers": T5 | {"num_experts": 4},
    }
)
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
PICTURES = same("vit deit beit dinov2", **PICTURE) | {
    "convnext": STAGES | {"num_stages": 2},
    "resnet": STAGES | {"embedding_size": 8},
    "swin": {
        "num_attention_heads": None,
        "num_hidden_layers": None,
        "hidden_size": None,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 4,
        "patch_size": 4,
        "image_size": 32,
    },
    "segformer": STAGES
    | {
        "num_encoder_blocks": 2,
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16,
    },
    "mobilenet_v2": {"image_size": 32},
    "regnet": STAGES | {"embedding_size": 8, "groups_width": 8},
    "siglip": TWO,
    "clip": TWO | {"projection_dim": 16},
}
CONVOLUTIONS = {
    "conv_dim": [8, 8],
    "conv_stride": [4, 4],
    "conv_kernel": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
SOUNDS = same("wav2vec2 hubert", **CONVOLUTIONS) | {
    "whisper": PAIR
    | {
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 64,
        "pad_token_id": 0,
    },
}
KINDS = {
    "text": TEXT,
    "mixtures": {name: EXPERTS | more for name, more in MIXTURES.items()},
    "states": STATES,
    "masked": MASKED,
    "pairs": PAIRS,
    "pictures": PICTURES,
    "sounds": SOUNDS,
}
FAMILIES = {name: more for kind in KINDS.values() for name, more in kind.items()}

# Before 5.23: checkpoints by another name and not of one layer in two; encoders that read a number
# to see whether a layer is left out.
OLDER = not hasattr(PreTrainedModel, "activation_checkpointing_enable")


def tiny_config(family: str, **more):
    """A config of ``family`` with two narrow layers."""
    known, own = AutoConfig.for_model(family), FAMILIES[family] | more
    common = {k: v for k, v in SMALL.items() if hasattr(known, k) and k not in own}
    return AutoConfig.for_model(family, **common, **{k: v for k, v in own.items() if v is not None})


def with_dropout(config, p: float):
    """``config`` with every dropout at ``p``."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, p)
    return config
