"""LoRA's additions in a trained model: found, merged, and saved as PEFT keeps them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ..techniques.lora import LoRALinear, replace
from .losses import predicts_next_token


def adapters_of(model: nn.Module) -> dict[str, LoRALinear]:
    """LoRA's layers in ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def has_adapters(model: nn.Module) -> bool:
    """Whether LoRA is in ``model`` already, ours or by PEFT."""
    return hasattr(model, "peft_config") or bool(adapters_of(model))


def save_adapters(model: nn.Module, folder: str | Path) -> None:
    """Write LoRA's additions in PEFT's format: ``adapter_model.safetensors`` and ``adapter_config.json``.

    A layer with an addition that the pretrained model does not have (a classifier's, which starts random) is written merged, as
    one of PEFT's ``modules_to_save``. ``ValueError`` where PEFT would compute something else with what is written.
    """
    adapters, folder = adapters_of(model), Path(folder)
    kept = {id(p) for module in adapters.values() for p in (module.A, module.B)}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in kept]
    mixers = [n for n in adapters if "Mixer" in type(model.get_submodule(n.rpartition(".")[0])).__name__]
    if others or mixers:
        why = "is trained too, and no addition" if others else "is multiplied without a call: PEFT needs it"
        raise ValueError(
            f"{(others or mixers)[0]} {why}: merge_adapters(model).save_pretrained(folder) writes the whole model"
        )
    inside = f"{getattr(model, 'base_model_prefix', '')}."
    heads = [name for name in adapters if not name.startswith(inside) and hasattr(model, inside[:-1])]
    state: dict[str, torch.Tensor] = {}
    if not (added := {name: module for name, module in adapters.items() if name not in heads}):
        raise ValueError(
            f"there is no addition to a pretrained layer in this {type(model).__name__}, only {heads or 'its own weights'}: "
            "merge_adapters(model).save_pretrained(folder) writes the whole model"
        )
    for name, module in added.items():
        state |= {f"{name}.lora_A.weight": module.A, f"{name}.lora_B.weight": module.B}
    for name in heads:
        head = adapters[name]
        state |= {f"{name}.weight": head.weight} | ({} if head.bias is None else {f"{name}.bias": head.bias})
    first = next(iter(added.values()))
    ranks = {name: len(module.A) for name, module in added.items()}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if predicts_next_token(model) else None,
        "base_model_name_or_path": getattr(model.config, "name_or_path", ""),
        "inference_mode": True,
        "target_modules": list(added),
        "modules_to_save": heads or None,
        "r": len(first.A),
        "lora_alpha": first.scale * len(first.A),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != len(first.A)},
        "alpha_pattern": {name: module.scale * ranks[name] for name, module in added.items()
                          if module.scale * ranks[name] != first.scale * len(first.A)},
        "fan_in_fan_out": type(first.base).__name__ == "Conv1D",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}": t.detach().contiguous() for name, t in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """Write LoRA's additions into the weights, in place, and return ``model``: an ordinary one, to save and load anywhere.

    Of a ``peft`` model, what its ``merge_and_unload`` returns. ``ValueError`` where the frozen weights are in 4 bits: what was
    added would be lost in their rounding.
    """
    if hasattr(model, "merge_and_unload"):
        return model.merge_and_unload()
    for name, module in adapters_of(model).items():
        replace(model, name, module.merged())
    return model
