"""Any transformers family with a head that trains, made small: its own default config, where each
size that is known by its field's name gets a small number.
"""

from __future__ import annotations

import copy

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto

from gradmem_lib.model.configs import skeleton

HEADS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "AUDIO_CLASSIFICATION",
)
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "encoder_num_hidden_layers",
    "decoder_num_hidden_layers",
)
# Small sizes by the names of fields. Widths stay multiples of heads and groups.
SMALL = {
    32: """
        hidden_size n_embd d_model dim emb_dim embed_dim embedding_size lru_width
        word_embed_proj_dim attention_hidden_size encoder_hidden_size decoder_hidden_size
        output_hidden_size projection_dim hidden_size_per_layer_input
    """,
    48: """
        intermediate_size ffn_dim d_ff d_inner encoder_ffn_dim decoder_ffn_dim dff n_inner
        hidden_dim ffn_hidden_size shared_intermediate_size
    """,
    16: """
        moe_intermediate_size shared_expert_intermediate_size index_topk num_mel_bins
        max_source_positions classifier_proj_size codevector_dim proj_codevector_dim
        xvector_output_dim num_conv_pos_embeddings
    """,
    8: """
        head_dim d_kv kv_lora_rank q_lora_rank v_head_dim sliding_window mamba_d_head
        mamba_n_heads n_mamba_heads linear_key_head_dim linear_value_head_dim index_head_dim
        window_size kv_channels attention_chunk_size
    """,
    4: """
        num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
        decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts
        linear_num_key_heads linear_num_value_heads index_n_heads qk_rope_head_dim
        qk_nope_head_dim rotary_dim mamba_d_state state_size num_codevectors_per_group
        num_conv_pos_embedding_groups
    """,
    2: "num_key_value_heads num_experts_per_tok moe_topk num_codevector_groups",
    1: "n_group topk_group mamba_n_groups n_shared_experts first_k_dense_replace",
    64: "max_position_embeddings n_positions n_ctx max_seq_len image_size",
    96: "vocab_size vocab_size_per_layer_input",
}
SIZES = {name: size for size, names in SMALL.items() for name in names.split()}
# Lists with a value for each layer are made from the number of layers again.
BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")
MOST_PARAMETERS = 3_000_000


def families() -> list[str]:
    """Every type of models that has one of ``HEADS``."""
    found = set()
    for head in HEADS:
        found.update(getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES"))
    return sorted(found)


def small_settings(config: PretrainedConfig, layers: int) -> dict:
    """The settings of ``config`` that become small, also those of configs inside it."""
    settings: dict = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            inside = value.to_dict()
            inside.update(small_settings(value, layers))
            settings[name] = inside
        elif name in LAYERS:
            settings[name] = layers
        elif name in SIZES and type(value) is int:
            settings[name] = min(value, SIZES[name])
        elif name in BY_LAYER:
            settings[name] = None
        elif name.endswith("token_id") and type(value) is int:
            settings[name] = min(value, 2)
    return settings


def shrunk(family: str, layers: int) -> PretrainedConfig:
    """A small config of ``family`` with ``layers`` layers in each list.

    Raises ``ValueError`` if its model is not small: this family has sizes by names of its own.
    """
    config = AutoConfig.for_model(family)
    settings = small_settings(config, layers)
    small = AutoConfig.for_model(family, **settings)
    parameters = sum(p.numel() for p in skeleton(copy.deepcopy(small)).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"the small {family} still has {parameters:,} parameters")
    return small
