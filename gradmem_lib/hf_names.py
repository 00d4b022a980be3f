"""What is known of transformers by name alone, because no object can be asked for it.

``tests/repository/test_hf_names.py`` asks the installed transformers whether each name is still
there. It also finds the optional fields of configs, which are read where they are needed, as in
``getattr(config, "use_cache", False)``. Private names stand in ``compat``.
"""

import sys
from typing import Any

# Classes that a model's objects are compared with.
CLASSES = {
    "GradientCheckpointingLayer": "transformers.modeling_layers",  # a layer in a list of layers
    "Cache": "transformers.cache_utils",  # keys and values of earlier tokens
    "PreTrainedModel": "transformers.modeling_utils",
    "Conv1D": "transformers.pytorch_utils",  # GPT-2's linear layer, whose matrix is (in, out)
}


def hf_class(name: str) -> Any:
    """The class of transformers with this name, for ``isinstance``.

    It is ``()`` while the class's module is not imported, because no object can be of that class
    yet. Raises ``AttributeError`` if the module has lost the class.
    """
    module = sys.modules.get(CLASSES[name])
    return () if module is None else getattr(module, name)


# Checkpoints, before and after transformers 5.23: ``model.NAME_enable()``, ``NAME_disable()``, and
# the argument of ``TrainingArguments``. A layer has the older name as its switch in both.
CHECKPOINTING_METHODS = ("activation_checkpointing", "gradient_checkpointing")
LAYER_SWITCH = "gradient_checkpointing"

# What a layer's first argument is called, if a model passes it by name.
LAYER_INPUT = "hidden_states"
# With one of these, a model needs the output of each layer. Arguments of forward, and fields of
# configs.
OUTPUTS_OF_EACH_LAYER = ("output_hidden_states", "output_attentions")

# Parts of a layer, by the ends of the names of their classes.
PARTS = {"attention": ("Attention",), "mlp": ("MLP", "LayerFF")}
# The table of learned positions, by the end of its name in the model.
POSITION_TABLE = "position_embeddings"

# The tables of classes by config, ``MODEL_FOR_..._MAPPING``, in the order in which they are
# searched. The first ones are for an encoder with a decoder.
PAIR_TABLES = ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM")
TABLES = (
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "CTC",
    # Last: language models that also take sounds, and have no pair of an encoder and a decoder.
    "SEQ_TO_SEQ_CAUSAL_LM",
    "AUDIO_CLASSIFICATION",
)

# Of the types of models that model/models.json has, those that take pictures or sounds and no
# tokens. The command line asks before transformers is imported.
NO_TOKENS = ("dinov2", "resnet", "swin", "vit", "wav2vec2")

# The labels that a model takes, by the end of its class's name. Other models take tokens; ``None``:
# the name does not say.
LABELS_OF_HEAD = {
    "ForSequenceClassification": "class",
    "ForImageClassification": "class",
    "ForTokenClassification": "class of a token",
    "ForQuestionAnswering": "ends",
    "ForQuestionAnsweringSimple": "ends",
    "ForMultipleChoice": None,
    "ForSemanticSegmentation": None,
    "ForNextSentencePrediction": None,
    "ForPreTraining": None,
    "ForCTC": None,
}
# Inputs, by the ends of their names, that make a loss the mean of something else, as a second kind
# of labels does.
INPUTS_OF_THE_LOSS = ("_label", "_labels", "bbox_first_token_mask", "num_items_in_batch")
# Labels that a loss ignores, if its config has a number of its own for them.
IGNORED_LABELS = ("semantic_loss_ignore_index", "loss_ignore_index", "sparse_pred_ignore_index")

# The names that different families' configs use for the same size.
SIZES = {
    "layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "decoder_layers",
        "encoder_layers",
        "num_blocks",
    ),
    "size": (
        "hidden_size",
        "n_embd",
        "d_model",
        "emb_dim",
        "mamba_d_ssm",
        "lru_width",
        "embedding_size",
        "word_embed_proj_dim",
        "attention_hidden_size",
    ),
    "heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
        "num_key_value_heads",
        "num_kv_heads",
        "mamba_n_heads",
        "n_groups",
        "mamba_n_groups",
    ),
    "inside": (
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "n_inner",
        "ffn_dim",
        "decoder_ffn_dim",
        "encoder_ffn_dim",
        "expert_ffn_hidden_size",
        "intermediate_size_mlp",
        "shared_intermediate_size",
        "ffn_hidden_size",
    ),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "chosen": ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "token": (
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "sep_token_id",
        "decoder_start_token_id",
    ),
}
