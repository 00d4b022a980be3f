"""Models that people know by name: their sizes, without a network."""

from __future__ import annotations

import copy
import os
import re
from typing import Any

from torch import nn

from ..prediction.configs import find_config, title_of
from ..techniques.shapes import SHAPES

# fmt: off
# Sizes of decoders, as their makers publish them. In a row: name, ids on the hub after the maker's (the first one is loaded;
# a single one has the named variant too), then ``_SIZES``; and what the architecture's own config says otherwise.
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "intermediate_size", "max_position_embeddings")
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_GEMMA = _TIED | {"head_dim": 256}
_DECODERS = {
    ("llama", "meta-llama", ""): [
        ("Llama-3-8B", "Meta-Llama-3-8B Meta-Llama-3-8B-Instruct", 128256, 4096, 32, 32, 8, 14336, 8192, {}),
        ("Llama-3-70B", "Meta-Llama-3-70B Meta-Llama-3-70B-Instruct", 128256, 8192, 80, 64, 8, 28672, 8192, {}),
        ("Llama-3.1-8B", "Llama-3.1-8B Llama-3.1-8B-Instruct", 128256, 4096, 32, 32, 8, 14336, 131072, {}),
        ("Llama-3.1-70B", "Llama-3.1-70B Llama-3.1-70B-Instruct", 128256, 8192, 80, 64, 8, 28672, 131072, {}),
        ("Llama-3.2-3B", "Llama-3.2-3B Llama-3.2-3B-Instruct", 128256, 3072, 28, 24, 8, 8192, 131072, _TIED),
        ("Llama-3.3-70B", "Llama-3.3-70B-Instruct", 128256, 8192, 80, 64, 8, 28672, 131072, {}),
    ],
    ("llama", "HuggingFaceTB", "-Instruct"): [
        ("SmolLM2-360M", "SmolLM2-360M", 49152, 960, 32, 15, 5, 2560, 8192, _TIED),
        ("SmolLM2-1.7B", "SmolLM2-1.7B", 49152, 2048, 24, 32, 32, 8192, 8192, _TIED),
    ],
    ("llama", "TinyLlama", ""): [
        ("TinyLlama-1.1B", "TinyLlama-1.1B-Chat-v1.0", 32000, 2048, 22, 32, 4, 5632, 2048, {}),
    ],
    ("qwen2", "Qwen", "-Instruct"): [
        ("Qwen2.5-0.5B", "Qwen2.5-0.5B", 151936, 896, 24, 14, 2, 4864, 32768, _TIED),
        ("Qwen2.5-1.5B", "Qwen2.5-1.5B", 151936, 1536, 28, 12, 2, 8960, 131072, _TIED),
        ("Qwen2.5-3B", "Qwen2.5-3B", 151936, 2048, 36, 16, 2, 11008, 32768, _TIED),
        ("Qwen2.5-7B", "Qwen2.5-7B", 152064, 3584, 28, 28, 4, 18944, 131072, _UNTIED),
        ("Qwen2.5-14B", "Qwen2.5-14B", 152064, 5120, 48, 40, 8, 13824, 131072, _UNTIED),
        ("Qwen2.5-32B", "Qwen2.5-32B", 152064, 5120, 64, 40, 8, 27648, 131072, _UNTIED),
        ("Qwen2.5-72B", "Qwen2.5-72B", 152064, 8192, 80, 64, 8, 29568, 131072, _UNTIED),
    ],
    ("qwen3", "Qwen", "-Base"): [
        ("Qwen3-0.6B", "Qwen3-0.6B", 151936, 1024, 28, 16, 8, 3072, 40960, _TIED),
        ("Qwen3-1.7B", "Qwen3-1.7B", 151936, 2048, 28, 16, 8, 6144, 40960, _TIED),
        ("Qwen3-4B", "Qwen3-4B", 151936, 2560, 36, 32, 8, 9728, 40960, _TIED),
        ("Qwen3-8B", "Qwen3-8B", 151936, 4096, 36, 32, 8, 12288, 40960, _UNTIED),
        ("Qwen3-14B", "Qwen3-14B", 151936, 5120, 40, 40, 8, 17408, 40960, _UNTIED),
        ("Qwen3-32B", "Qwen3-32B", 151936, 5120, 64, 64, 8, 25600, 40960, _UNTIED),
    ],
    ("mistral", "mistralai", ""): [
        ("Mistral-7B", "Mistral-7B-v0.1", 32000, 4096, 32, 32, 8, 14336, 32768, {"sliding_window": 4096}),
        ("Mistral-7B-v0.3", "Mistral-7B-v0.3 Mistral-7B-Instruct-v0.3", 32768, 4096, 32, 32, 8, 14336, 32768,
         {"sliding_window": None}),
    ],
    ("phi", "microsoft", ""): [
        ("Phi-1.5", "phi-1_5", 51200, 2048, 24, 32, 32, 8192, 2048, {}),
        ("Phi-2", "phi-2", 51200, 2560, 32, 32, 32, 10240, 2048, {}),
    ],
    ("phi3", "microsoft", ""): [
        ("Phi-3-mini", "Phi-3-mini-4k-instruct", 32064, 3072, 32, 32, 32, 8192, 4096, {}),
        ("Phi-4", "phi-4", 100352, 5120, 40, 40, 10, 17920, 16384, {}),
    ],
    ("gemma", "google", "-it"): [
        ("Gemma-2B", "gemma-2b", 256000, 2048, 18, 8, 1, 16384, 8192, _GEMMA),
        ("Gemma-7B", "gemma-7b", 256000, 3072, 28, 16, 16, 24576, 8192, _GEMMA),
    ],
    ("gemma2", "google", "-it"): [
        ("Gemma-2-2B", "gemma-2-2b", 256000, 2304, 26, 8, 4, 9216, 8192, _GEMMA),
        ("Gemma-2-9B", "gemma-2-9b", 256000, 3584, 42, 16, 8, 14336, 8192, _GEMMA),
        ("Gemma-2-27B", "gemma-2-27b", 256000, 4608, 46, 32, 16, 36864, 8192, _GEMMA | {"head_dim": 128}),
    ],
    ("gemma3_text", "google", "-it"): [
        ("Gemma-3-270M", "gemma-3-270m", 262144, 640, 18, 4, 1, 2048, 32768, _GEMMA),
        ("Gemma-3-1B", "gemma-3-1b-pt gemma-3-1b-it", 262144, 1152, 26, 4, 1, 6912, 32768, _GEMMA),
    ],
    ("gpt_neox", "EleutherAI", ""): [
        ("Pythia-160M", "pythia-160m", 50304, 768, 12, 12, 12, 3072, 2048, {}),
        ("Pythia-410M", "pythia-410m", 50304, 1024, 24, 16, 16, 4096, 2048, {}),
        ("Pythia-1B", "pythia-1b", 50304, 2048, 16, 8, 8, 8192, 2048, {}),
        ("Pythia-1.4B", "pythia-1.4b", 50304, 2048, 24, 16, 16, 8192, 2048, {}),
        ("Pythia-2.8B", "pythia-2.8b", 50304, 2560, 32, 32, 32, 10240, 2048, {}),
        ("Pythia-6.9B", "pythia-6.9b", 50432, 4096, 32, 32, 32, 16384, 2048, {}),
    ],
}
_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_T5 = {"architectures": ["T5ForConditionalGeneration"]}
_T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
_BART = {"architectures": ["BartForConditionalGeneration"]}
_BART_BASE = {"d_model": 768, "encoder_layers": 6, "encoder_ffn_dim": 3072, "encoder_attention_heads": 12,
              "decoder_layers": 6, "decoder_ffn_dim": 3072, "decoder_attention_heads": 12}
# Others: name, ids on the hub, architecture, and where its config says otherwise than transformers' default.
_OTHERS = [
    ("GPT-2 medium", "openai-community/gpt2-medium", "gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    ("GPT-2 large", "openai-community/gpt2-large", "gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    ("DistilGPT-2", "distilbert/distilgpt2", "gpt2", {"n_layer": 6}),
    ("OPT-125M", "facebook/opt-125m", "opt", {}),
    ("BERT-base", "google-bert/bert-base-uncased", "bert", {}),
    ("BERT-large", "google-bert/bert-large-uncased", "bert", _BERT_LARGE),
    ("DistilBERT", "distilbert/distilbert-base-uncased", "distilbert", {}),
    ("RoBERTa-base", "FacebookAI/roberta-base", "roberta", _ROBERTA),
    ("RoBERTa-large", "FacebookAI/roberta-large", "roberta", _ROBERTA | _BERT_LARGE),
    ("T5-small", "google-t5/t5-small", "t5", _T5),
    ("T5-base", "google-t5/t5-base", "t5", _T5 | _T5_BASE),
    ("BART-base", "facebook/bart-base", "bart", _BART | _BART_BASE),
    ("BART-large", "facebook/bart-large", "bart", _BART),
    ("ViT-base", "google/vit-base-patch16-224", "vit", {"num_labels": 1000}),
    ("ViT-large", "google/vit-large-patch16-224", "vit", _BERT_LARGE | {"num_labels": 1000}),
]
# Those whose sizes ``SHAPES`` has: ids, positions.
_SHAPED = {
    "tiny Llama": ("", 2048),
    "SmolLM2-135M": ("HuggingFaceTB/SmolLM2-135M-Instruct HuggingFaceTB/SmolLM2-135M", 8192),
    "GPT-2": ("openai-community/gpt2", 1024),
    "GPT-2 XL": ("openai-community/gpt2-xl", 1024),
    "Llama-3.2-1B": ("meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-1B-Instruct", 131072),
    "Llama-2-7B": ("meta-llama/Llama-2-7b-hf meta-llama/Llama-2-7b-chat-hf", 4096),
    "Llama-2-13B": ("meta-llama/Llama-2-13b-hf meta-llama/Llama-2-13b-chat-hf", 4096),
    "Llama-2-70B": ("meta-llama/Llama-2-70b-hf meta-llama/Llama-2-70b-chat-hf", 4096),
}
# fmt: on


def _table() -> dict[str, tuple[list[str], Any]]:
    """Name: (ids on the hub, what makes its config)."""
    from transformers import AutoConfig

    def made(kind, fields):
        return lambda: AutoConfig.for_model(kind, **copy.deepcopy(fields))

    def shaped(name, positions):
        # The hub's GPT-2s are trained with dropout, and its masks take memory.
        return lambda: SHAPES[name].config(positions=positions, dropout=0.1)

    known = {name: (ids.split(), shaped(name, at)) for name, (ids, at) in _SHAPED.items()}
    for (kind, maker, variant), rows in _DECODERS.items():
        for name, ids, *sizes, more in rows:
            all_ids = [f"{maker}/{one}" for one in ids.split()]
            all_ids += [f"{one}{variant}" for one in all_ids if variant and len(all_ids) == 1]
            known[name] = all_ids, made(kind, dict(zip(_SIZES, sizes, strict=True)) | more)
    return known | {name: (ids.split(), made(kind, more)) for name, ids, kind, more in _OTHERS}


def known_models() -> list[str]:
    """The names that ``known_model`` knows."""
    return list(_table())


def known_model(name: str) -> tuple[str, Any, str] | None:
    """(name, config, hub id) of a well-known model, in whatever way its name or its id is written; ``None`` for others.

    The config has the model's sizes and needs no network. Where an id was given, the hub id is that one.
    """
    wanted = _plain(name)
    for known, (ids, config) in _table().items():
        if wanted == _plain(known):
            return known, config(), ids[0] if ids else ""
        for one in ids:
            if wanted in (_plain(one), _plain(one.rpartition("/")[2])):
                return known, config(), one
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_model(given) -> tuple[Any, str]:
    """(config, title) of a model, a config, a well-known name, a folder or a hub id; else a ``ValueError``."""
    if isinstance(given, nn.Module):
        config = getattr(given, "config", None)
        if config is None:
            raise ValueError(
                f"{type(given).__name__} has no config: plan is for transformers models. For other modules, predict each recipe "
                "with predict(model, batch=..., recipe=Recipe(...))"
            )
        config = copy.deepcopy(config)
        config.architectures = [type(given).__name__]
        return config, type(given).__name__
    named = isinstance(given, str) and not os.path.exists(given)
    known = known_model(given) if named else None
    if known is not None:
        return known[1], known[0]
    try:
        config = find_config(given)
        return config, title_of(given, config)
    except TypeError:
        raise
    except ValueError as error:
        start = _plain(given.rpartition("/")[2])[:5] if named else ""
        like = [name for name in known_models() if len(start) > 2 and start in _plain(name)]
        if not like:
            raise
        raise ValueError(f"{error}. Known by name, without a network: {', '.join(like)}") from error
    except Exception as error:  # transformers checks a config's fields in ways of its own
        said = (str(error).strip().splitlines() or [""])[-1].strip()
        raise ValueError(f"the config of {given} is not valid ({type(error).__name__}: {said})") from error
