"""Finds LoRA's additions in a trained model, merges them, and saves them in PEFT's format."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..hf_names import hf_class
from ..model.classes import predicts_next_token
from ..techniques.lora import LoRALinear

WHOLE_MODEL = "merge_adapters(model).save_pretrained(folder) writes the whole model"


def adapters_of(model: nn.Module) -> dict[str, LoRALinear]:
    """The LoRA layers in ``model`` by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` has LoRA already, from this library or from PEFT."""
    return hasattr(model, "peft_config") or bool(adapters_of(model))


def save_adapters(model: nn.Module, folder: str | Path) -> None:
    """Write LoRA's additions in PEFT's format: ``adapter_model.safetensors`` and
    ``adapter_config.json``.

    A layer that the pretrained model does not have (a classifier, which starts random) is written
    merged with its addition, as one of PEFT's ``modules_to_save``. Raises ``ValueError`` if PEFT
    would compute something else from these files.
    """
    adapters, folder = adapters_of(model), Path(folder)
    adapter_ids = {id(p) for module in adapters.values() for p in (module.A, module.B)}
    others = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in adapter_ids:
            others.append(name)
    if others:
        raise ValueError(f"{others[0]} is trained too, and no addition: {WHOLE_MODEL}")
    inside = f"{getattr(model, 'base_model_prefix', '')}."
    heads = [
        name for name in adapters if not name.startswith(inside) and hasattr(model, inside[:-1])
    ]
    state: dict[str, torch.Tensor] = {}
    if not (added := {name: module for name, module in adapters.items() if name not in heads}):
        raise ValueError(
            f"there is no addition to a pretrained layer in this {type(model).__name__}, only "
            f"{heads or 'its own weights'}: {WHOLE_MODEL}"
        )
    _check_calls(added)
    for name, module in added.items():
        state |= {f"{name}.lora_A.weight": module.A, f"{name}.lora_B.weight": module.B}
    for name in heads:
        head = adapters[name]
        state[f"{name}.weight"] = head.merged_weight()
        if head.bias is not None:
            state[f"{name}.bias"] = head.bias
    kinds = {(len(module.A), module.scale, module.dropout) for module in added.values()}
    if len(kinds) > 1:
        raise ValueError(
            "give all additions the same rank, scale and dropout, as add_lora does: they have "
            f"{' and '.join(map(str, sorted(kinds)))}. Or {WHOLE_MODEL}"
        )
    [(rank, scale, dropout)] = kinds
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if predicts_next_token(model) else None,
        "base_model_name_or_path": getattr(model.config, "name_or_path", ""),
        "inference_mode": True,
        "target_modules": list(added),
        "modules_to_save": heads or None,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": dropout,
        "fan_in_fan_out": isinstance(next(iter(added.values())).base, hf_class("Conv1D")),
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}": t.detach().contiguous() for name, t in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )


def _check_calls(added: dict[str, LoRALinear]) -> None:
    """Refuse layers that the model was seen using without a call: PEFT adds to a call's output.

    A layer that a model neither calls nor reads has no effect, here or there.
    """
    seen = [module for module in added.values() if module.was_called or module.weight_was_read]
    if not seen:
        raise ValueError(
            "the model was not run since it got its additions, so that nobody knows which of its "
            "layers are called, as PEFT needs it: run it once, such as model(**batch). Or "
            f"{WHOLE_MODEL}"
        )
    for name, module in added.items():
        if module.weight_was_read and not module.was_called:
            raise ValueError(f"{name} is multiplied without a call: PEFT needs it. {WHOLE_MODEL}")


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """Write LoRA's additions into the weights, in place, or into a copy of a weight that another
    module has too. Returns ``model`` as an ordinary model, to save and load anywhere.

    For a ``peft`` model, this is its ``merge_and_unload``. Raises ``ValueError`` for a base in 4
    bits, whose rounding would lose them, and for a ``peft`` model that adds tokens, not weights.
    """
    if hasattr(model, "peft_config") and not hasattr(model, "merge_and_unload"):
        if hasattr(model, "prompt_encoder"):
            raise ValueError(
                "write what was trained with model.save_pretrained(folder): tokens that are put "
                "before each row (prompt and prefix tuning) are in no weight of the base"
            )
        raise ValueError(
            "write the adapters with model.save_pretrained(folder), and merge "
            "peft.PeftModel.from_pretrained(base, folder): add_adapter gives a model no merge of "
            "its own"
        )
    owners = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))

    def let_own(layer: nn.Module) -> None:
        weight = getattr(layer, "weight", None)
        if owners[id(weight)] > 1:  # an embedding, say, has it too, and keeps it
            own_weight = weight.detach().clone()
            layer.weight = nn.Parameter(own_weight, requires_grad=False)

    if hasattr(model, "merge_and_unload"):
        for module in model.modules():
            if hasattr(module, "get_base_layer"):
                let_own(module.get_base_layer())
        return _untied_in_config(model.merge_and_unload())
    layers = sorted(
        adapters_of(model).items(), key=lambda t: isinstance(t[1].base.weight, nn.Parameter)
    )
    # those in 4 bits come first: they are refused before anything changes
    for name, module in layers:
        let_own(module.base)
        model.set_submodule(name, module.merged())
    return model


def _untied_in_config(model: nn.Module) -> nn.Module:
    """``model``, whose config says so if its head has no longer the embedding's weight: to load it
    would tie them again.
    """
    config: Any = getattr(model, "config", None)
    head = None
    if getattr(config, "tie_word_embeddings", False):
        head = model.get_output_embeddings()
    if head is not None:
        config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
    return model
