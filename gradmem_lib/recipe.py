"""A recipe: every decision that changes a training step's memory, in one place, and the code that carries it out.

``prepare`` turns a model and a ``Recipe`` into a model and an optimizer that train that way, and ``step`` runs one optimizer
step. Both work on real tensors and on fake ones alike. A prediction is this very code run without memory behind the tensors,
which is why it comes out at the same bytes as the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

PRECISIONS = {
    "float32": "everything in float32",
    "bf16": "weights, gradients, optimizer states and activations in bf16",
    "autocast-bf16": "float32 weights, gradients and states; matrix products in bf16",
    "autocast-fp16": "the same with float16, and a scaled loss",
    "float32-master": "bf16 weights and gradients; the optimizer keeps float32 weights and states",
}
OPTIMIZERS = {
    "adamw": "AdamW, one parameter after another",
    "adamw-foreach": "AdamW on all parameters at once, with a temporary copy of the model",
    "adamw-fused": "AdamW in one kernel, in place",
    "adamw-8bit": "AdamW whose states take one byte a number",
    "adafactor": "row and column sums in place of the second moment, as transformers has it: with float32 copies of a tensor",
    "adafactor-torch": "the same, as torch.optim has it: one copy of a tensor, in its own dtype; a relative learning rate",
    "sgd": "no state, or one with momentum",
}
ATTENTION = {
    "fused": "one kernel that never stores the scores",
    "eager": "scores, softmax and product one by one",
}
CHECKPOINTING = ("per-layer", "sqrt", "best")
IGNORED = -100
LOSS_SCALE = 2.0**12
RATE = 1e-4
# Of torch's Adafactor, relative to a weight's size: T5's in fine-tuning (Raffel et al. 2020). The default, 1e-2, is that
# of its pretraining.
RELATIVE_RATE = 1e-3
# And what is added where a gradient is zero. The default is the rounding unit of the weights' dtype, 0.0078 in bf16: above
# nearly every gradient, so that none would be normalized. The square of this is still a number in bf16.
ADAFACTOR_EPS = (1e-16, 1e-3)
CHUNK_TOKENS = 128  # of 128,256 words in float32: 63 MiB


def _choose(what: str, value, names) -> None:
    if value not in names:
        raise ValueError(f"{what}={value!r} is not known: choose one of {', '.join(map(repr, names))}")


def _whole(what: str, value, example: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what}={value!r}: give a whole number of at least 1, such as {what}={example}")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, as far as memory is concerned. Impossible combinations are a ``ValueError`` that says what to do.

    Attributes:
        precision: a key of ``PRECISIONS``.
        optimizer: a key of ``OPTIMIZERS``; ``momentum`` is SGD's.
        in_backward: step each parameter as soon as its gradient is complete, and free the gradient at once.
        attention: ``"fused"``, ``"eager"``, or ``None`` to leave the model's as it is.
        checkpointing: ``None``, ``"per-layer"``, ``"sqrt"``, ``"best"``, a segment's number of layers, or a list of them
            (``checkpointing.checkpoint_layers`` says what each means).
        every_n_layers: checkpoint one layer in so many and keep the others, as transformers does.
        accumulation: micro-batches that a batch is cut into; gradients add up before one optimizer step.
        lora_rank: train low-rank additions of this rank and freeze all else. ``lora_targets`` are the last parts of the names
            of the linear layers that get one; empty means every linear layer but the output's.
        quantized_base: keep the linear layers that LoRA freezes in 4 bits (QLoRA; see ``quantized.py``).
        frozen_base: train the head alone.
        chunked_loss: compute the loss ``CHUNK_TOKENS`` tokens at a time, so that the logits never exist as a whole.
    """

    precision: str = "float32"
    optimizer: str = "adamw"
    momentum: float = 0.0
    in_backward: bool = False
    attention: str | None = "fused"
    checkpointing: str | int | tuple | None = None
    every_n_layers: int | None = None
    accumulation: int = 1
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    quantized_base: bool = False
    frozen_base: bool = False
    chunked_loss: bool = False

    def __post_init__(self) -> None:
        _choose("precision", self.precision, PRECISIONS)
        _choose("optimizer", self.optimizer, OPTIMIZERS)
        _choose("attention", self.attention, (*ATTENTION, None))
        _whole("accumulation", self.accumulation, 4)
        if isinstance(self.lora_targets, str):
            object.__setattr__(self, "lora_targets", (self.lora_targets,))
        object.__setattr__(self, "lora_targets", tuple(self.lora_targets))
        object.__setattr__(self, "checkpointing", _frozen_schedule(self.checkpointing))
        for switch in ("in_backward", "quantized_base", "frozen_base", "chunked_loss"):
            if not isinstance(getattr(self, switch), bool):
                raise ValueError(f"{switch}={getattr(self, switch)!r}: it is a switch, give True or False")
        self._check_together()

    def _check_together(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: give a number from 0 to below 1, such as 0.9")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f"momentum={self.momentum} belongs to SGD, and the optimizer is {self.optimizer!r}: leave it out, or choose "
                "optimizer='sgd'"
            )
        if self.in_backward and self.accumulation > 1:
            raise ValueError(
                f"in_backward=True frees each gradient as soon as it is complete, and accumulation={self.accumulation} adds "
                "them up over several backward passes: choose one of the two. With in_backward, cut the batch itself"
            )
        if self.in_backward and self.precision == "autocast-fp16":
            raise ValueError(
                "in_backward=True steps before the scaled gradients of autocast-fp16 could be checked and unscaled: choose "
                "precision='autocast-bf16', which needs no scaling"
            )
        if self.precision == "float32-master" and not self.optimizer.startswith("adamw"):
            raise ValueError(
                f"float32-master is written for AdamW, and the optimizer is {self.optimizer!r}: choose an AdamW, or another "
                "precision"
            )
        if self.precision == "float32-master" and self.optimizer == "adamw-8bit":
            raise ValueError(
                "8-bit states and a float32 copy of the weights pull in opposite directions: choose optimizer='adamw' with "
                "float32-master, or precision='bf16' with adamw-8bit"
            )
        if self.lora_rank is not None:
            if isinstance(self.lora_rank, int) and self.lora_rank < 1:
                raise ValueError(
                    f"lora_rank={self.lora_rank}: an addition of rank {self.lora_rank} has nothing to train; give a rank of at "
                    "least 1, such as 16, or None for training without LoRA"
                )
            _whole("lora_rank", self.lora_rank, 16)
        elif self.lora_targets:
            raise ValueError(
                f"lora_targets={self.lora_targets} without a rank: give lora_rank too, such as 16, or leave the targets out"
            )
        if self.quantized_base and (self.lora_rank is None or self.autocast_dtype is not None):
            raise ValueError(
                "quantized_base=True keeps frozen weights in 4 bits, which cannot be trained and are written out in the dtype of "
                "what they multiply: give lora_rank too, such as 16, and precision='bf16' or 'float32'"
            )
        if self.frozen_base and self.lora_rank is not None:
            raise ValueError("LoRA freezes the base already: leave frozen_base out")
        if self.every_n_layers is not None:
            _whole("every_n_layers", self.every_n_layers, 2)
            if self.checkpointing is not None:
                raise ValueError(
                    f"checkpointing={self.checkpointing!r} and every_n_layers={self.every_n_layers} are two ways to checkpoint: "
                    "give one. every_n_layers=1 is per-layer"
                )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return {"autocast-bf16": torch.bfloat16, "autocast-fp16": torch.float16}.get(self.precision)

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision in ("bf16", "float32-master") else torch.float32

    def micro_batch(self, batch_size: int) -> int:
        """Rows in one forward pass. ``ValueError`` where the batch cannot be cut evenly."""
        _whole("batch_size", batch_size, 8)
        if batch_size % self.accumulation:
            raise ValueError(
                f"a batch of {batch_size} cannot be cut into {self.accumulation} equal micro-batches: give a batch_size that "
                f"is a multiple of {self.accumulation}, or another accumulation"
            )
        return batch_size // self.accumulation


def _frozen_schedule(given):
    """A schedule as a hashable value, lists as tuples; ``ValueError`` for what is none."""
    if given is None or (isinstance(given, str) and given in CHECKPOINTING):
        return given
    if isinstance(given, (list, tuple)) and given:
        return tuple(_frozen_schedule(part) for part in given)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return given
    raise ValueError(
        f"checkpointing={given!r} is not known: give None, {', '.join(map(repr, CHECKPOINTING))}, the number of layers in a "
        "segment (at least 1), or a list of segment lengths such as [4, 3, 2]"
    )


# --- a model and an optimizer that follow the recipe ----------------------------------------------


class Prepared(NamedTuple):
    """``model`` (the one given, changed in place), ``optimizer`` (an ``Optimizer``, or a list of them for ``in_backward``),
    and ``undo``: ``undo.close()`` takes away checkpointing and the hooks that step in backward."""

    model: nn.Module
    optimizer: Optimizer | list[Optimizer]
    undo: ExitStack


def prepare(model: nn.Module, recipe: Recipe, *, lr: float | None = None) -> Prepared:
    """Change ``model`` in place as ``recipe`` says, and make its optimizer. Raises ``ValueError`` where they do not fit.

    Casts parameters and persistent buffers (rotary frequencies stay in float32, as ``from_pretrained`` leaves them), sets the
    attention, adds LoRA, freezes, and switches checkpointing on. The key-value cache is switched off: training has no use
    for it. Works on fake models too. Without ``lr`` the learning rate is ``RATE``, and ``RELATIVE_RATE`` for torch's Adafactor.
    """
    if lr is None:
        lr = RELATIVE_RATE if recipe.optimizer == "adafactor-torch" else RATE
    undo = ExitStack()
    change_model(model, recipe)
    set_checkpointing(model, recipe, undo)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not recipe.in_backward:
        return Prepared(model, make_optimizer(trained, recipe, lr), undo)
    optimizers = []
    for parameter in trained:
        optimizers.append(make_optimizer([parameter], recipe, lr))
        hook = parameter.register_post_accumulate_grad_hook(_step_and_free(optimizers[-1]))
        undo.callback(hook.remove)
    return Prepared(model, optimizers, undo)


def change_model(model: nn.Module, recipe: Recipe) -> None:
    """The lasting part of ``prepare``, in place: cache off, attention, dtype, LoRA, 4-bit base, frozen base.

    ``ValueError`` where nothing would be trained, and for LoRA on a model that has it: the additions would get additions.
    """
    if recipe.lora_rank is not None and any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ValueError(
            "this model has LoRA already: load it anew, or write its additions into the weights first "
            "(finetune.merge_adapters(model))"
        )
    model.train()
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    set_attention(model, {"fused": "sdpa"}.get(recipe.attention, recipe.attention))
    cast_weights(model, recipe.weight_dtype)
    if recipe.lora_rank is not None:
        add_lora(model, recipe.lora_rank, recipe.lora_targets)
    if recipe.quantized_base:
        from .quantized import quantize_base

        quantize_base(model)
    if recipe.frozen_base:
        freeze_base(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "there is nothing to train: every parameter is frozen. Leave frozen_base out, or set requires_grad on some of them"
        )


def _step_and_free(optimizer: Optimizer) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return hook


def set_attention(model: nn.Module, name: str | None) -> None:
    """Switch a transformers model to the attention ``name``; other modules, and ``None``, are left as they are."""
    if name is None or not hasattr(model, "set_attn_implementation"):
        return
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and persistent floating-point buffers to ``dtype``, in place; ties stay ties."""
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.is_floating_point() or name in module._non_persistent_buffers_set:
                continue
            tensor.data = tensor.data.to(dtype)


def set_checkpointing(model: nn.Module, recipe: Recipe, undo: ExitStack) -> None:
    """Per layer as transformers does it, where the model knows how; segments through ``checkpoint_layers``."""
    every = recipe.every_n_layers or (1 if recipe.checkpointing == "per-layer" else None)
    if every is not None and hasattr(model, "gradient_checkpointing_enable"):
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
            undo.callback(model.activation_checkpointing_disable)
        elif every == 1:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            undo.callback(model.gradient_checkpointing_disable)
        else:
            raise ValueError(
                f"every_n_layers={every} needs transformers 5.23 or newer: update it, or choose checkpointing='per-layer'"
            )
    elif recipe.every_n_layers is not None:
        raise ValueError(
            f"every_n_layers is an option of transformers models, and {type(model).__name__} is none: choose checkpointing="
            "'per-layer', or a list of segment lengths"
        )
    elif every is not None or recipe.checkpointing is not None:
        from .checkpointing import checkpoint_layers

        schedule = every or recipe.checkpointing
        handle = checkpoint_layers(model, every=_thawed(schedule))
        undo.callback(handle.remove)


def _thawed(schedule):
    return [_thawed(part) for part in schedule] if isinstance(schedule, tuple) else schedule


# --- LoRA -----------------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained addition of low rank: ``base(x) + scale * B(A(x))`` (Hu et al. 2021, section 4.1).

    ``A`` (rank, in) starts random and ``B`` (out, rank) at zero, so that training starts from the base model. Both have the
    base's dtype. ``base`` is an ``nn.Linear`` or transformers' ``Conv1D`` (GPT-2), whose weight is the other way round.
    """

    def __init__(self, base: nn.Module, rank: int, alpha: float | None = None):
        super().__init__()
        inside, outside = _linear_sizes(base)
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(base.weight.new_empty(rank, inside))
        self.B = nn.Parameter(base.weight.new_zeros(outside, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = (2 * rank if alpha is None else alpha) / rank

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (..., in) to (..., out)."""
        return self.base(x) + F.linear(F.linear(x, self.A), self.B) * self.scale

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """The base with the addition written into its weight, for use after training."""
        addition = self.scale * (self.B @ self.A)
        self.base.weight += addition if isinstance(self.base, nn.Linear) else addition.T
        return self.base


def _linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer, ``None`` for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and getattr(module, "nf", None) == module.weight.shape[1]:
        return tuple(module.weight.shape)
    return None


def add_lora(model: nn.Module, rank: int, targets: tuple[str, ...] = ()) -> int:
    """Freeze ``model`` and replace its linear layers by ``LoRALinear`` in place; returns how many.

    ``targets`` are names, or last parts of names (``"q_proj"``, ``"mlp.up_proj"``); none means all but the output layer.
    """
    model.requires_grad_(False)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = {n: m for n, m in model.named_modules() if _linear_sizes(m) and m is not head}
    chosen = {
        n: m for n, m in linear.items() if not targets or f".{n}".endswith(tuple(f".{t}" for t in targets))
    }
    if not chosen:
        ends = sorted({name.rpartition(".")[2] for name in linear})
        raise ValueError(
            f"no linear layer is called {' or '.join(map(repr, targets)) or 'anything'}: lora_targets are the last parts of "
            f"layers' names, and this model has {', '.join(map(repr, ends)) or 'no linear layer'}"
        )
    for name, module in chosen.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LoRALinear(module, rank))
    return len(chosen)


def freeze_base(model: nn.Module) -> None:
    """Freeze a transformers model's body; what is left of its parameters is the head."""
    base = getattr(model, "base_model", None)
    if base is None or base is model:
        raise ValueError(
            f"frozen_base trains the head alone, and {type(model).__name__} has none beside its body: freeze what you want "
            "yourself (parameter.requires_grad_(False)) and give the module to predict"
        )
    base.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "frozen_base leaves nothing to train: this model's output layer is tied to its embedding, which is part of the "
            "body. Use LoRA (lora_rank=16), or a model that is not tied"
        )


# --- optimizers -----------------------------------------------------------------------------------


def make_optimizer(parameters: list[nn.Parameter], recipe: Recipe, lr: float) -> Optimizer:
    """The optimizer that ``recipe`` names, its variant always explicit: torch would choose by device otherwise."""
    how = {
        "adamw": {"foreach": False, "fused": False},
        "adamw-foreach": {"foreach": True, "fused": False},
        "adamw-fused": {"foreach": False, "fused": True},
    }.get(recipe.optimizer)
    if recipe.precision == "float32-master":
        return MasterAdamW(parameters, lr=lr, **how)
    if how is not None:
        return torch.optim.AdamW(parameters, lr=lr, **how)
    if recipe.optimizer == "adamw-8bit":
        return AdamW8bit(parameters, lr=lr)
    if recipe.optimizer == "adafactor-torch":
        return torch.optim.Adafactor(parameters, lr=lr, eps=ADAFACTOR_EPS, foreach=False)
    if recipe.optimizer == "adafactor":
        # The one that transformers' Trainer uses, with its settings.
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=lr, scale_parameter=False, relative_step=False)
    return torch.optim.SGD(parameters, lr=lr, momentum=recipe.momentum, foreach=False)


class _OwnDtypes(Optimizer):
    """An optimizer whose states have dtypes of their own.

    ``Optimizer.load_state_dict`` casts what it loads to the parameter's dtype: a float32 copy of the weights would come back
    rounded to bf16, and 8-bit codes as numbers.
    """

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(index, {}).items():
                    if isinstance(value, Tensor) and name != "step":
                        self.state[p][name] = value.to(p.device, copy=True)


class MasterAdamW(_OwnDtypes):
    """AdamW for bf16 parameters that keeps the exact weights, and its moments, in float32.

    A bf16 weight has 8 bits of precision: an update below 1/256 of it would be lost. Here updates go to the float32 copy,
    and the parameter is that copy, rounded. One parameter at a time, so that one float32 gradient exists at a time;
    ``foreach`` and ``fused`` want all of them at once.
    """

    def __init__(
        self, params, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, *, foreach=False, fused=False
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.foreach, self.fused = foreach, fused

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            for p in ready:
                if not self.state[p]:
                    self.state[p] = {
                        "step": torch.zeros((), device=p.device) if self.fused else torch.tensor(0.0),
                        "master": p.detach().float(),
                        "exp_avg": torch.zeros_like(p, dtype=torch.float32),
                        "exp_avg_sq": torch.zeros_like(p, dtype=torch.float32),
                    }
            for some in [ready] if self.foreach or self.fused else [[p] for p in ready]:
                self._update(some, group)

    def _update(self, parameters: list[Tensor], group: dict) -> None:
        from torch.optim.adamw import adamw

        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [s["master"] for s in states],
            [p.grad.float() for p in parameters],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=self.foreach,
            fused=self.fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for p, s in zip(parameters, states, strict=True):
            p.copy_(s["master"])


BLOCK = 256
SMALLEST_8BIT = 4096


class AdamW8bit(_OwnDtypes):
    """AdamW whose moments take one byte a number (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization").

    The layout is bitsandbytes': blocks of 256 numbers share one float32, their largest magnitude; tensors below 4,096
    numbers stay in float32; two float32 tables of 256 values are shared by all parameters. The update runs inside one
    operator, as it does in their kernel, so that it needs no memory that an allocator would see.
    """

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._codes: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            if "code" in state:  # the tables are shared by all parameters again
                state["code"], state["code_sq"] = self._tables(p.device)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._codes:
            self._codes[device] = (_code(True, device), _code(False, device))
        return self._codes[device]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    self._start(p, state)
                state["step"] += 1
                small = "code" not in state
                none = p.grad.new_empty(0) if small else None
                _adamw_8bit()(
                    p, p.grad, state["exp_avg"], state["exp_avg_sq"],
                    *([none] * 4 if small else [state[k] for k in ("absmax", "absmax_sq", "code", "code_sq")]),
                    state["step"], group["lr"], *group["betas"], group["eps"], group["weight_decay"],
                )  # fmt: skip

    def _start(self, p: Tensor, state: dict) -> None:
        state["step"] = 0
        if p.numel() < SMALLEST_8BIT:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, dtype=torch.float32)
            return
        blocks = -(-p.numel() // BLOCK)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(p.shape, dtype=torch.uint8, device=p.device)
        for name in ("absmax", "absmax_sq"):
            state[name] = torch.zeros(blocks, device=p.device)
        state["code"], state["code_sq"] = self._tables(p.device)


def _code(signed: bool, device) -> Tensor:
    """256 increasing values from -1 (or 0) to 1, 0 among them: finer towards 0, seven decades wide."""
    half = torch.logspace(-7, 0, 128 if signed else 255, device=device)
    if not signed:
        return torch.cat([half.new_zeros(1), half])
    return torch.cat([-half[1:].flip(0), half.new_zeros(1), half])


@cache
def _adamw_8bit():
    """The 8-bit update as an operator of its own: one kernel to whoever watches, as bitsandbytes' is."""

    @torch.library.custom_op(
        "gradmem::adamw_8bit", mutates_args=("p", "exp_avg", "exp_avg_sq", "absmax", "absmax_sq")
    )
    def adamw_8bit(
        p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, absmax: Tensor, absmax_sq: Tensor,
        code: Tensor, code_sq: Tensor, step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    ) -> None:  # fmt: skip
        flat_p, flat_grad = p.view(-1), grad.reshape(-1)
        flat_m, flat_v = exp_avg.view(-1), exp_avg_sq.view(-1)
        slice_size = BLOCK * 4096
        for start in range(0, flat_p.numel(), slice_size):
            part = slice(start, start + slice_size)
            blocks = slice(start // BLOCK, (start + slice_size) // BLOCK)
            g = flat_grad[part].float()
            if code.numel():
                m = _dequantized(flat_m[part], absmax[blocks], code)
                v = _dequantized(flat_v[part], absmax_sq[blocks], code_sq)
            else:
                m, v = flat_m[part], flat_v[part]
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            w = flat_p[part].float() * (1 - lr * weight_decay)
            denominator = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
            flat_p[part] = w.addcdiv_(m, denominator, value=-lr / (1 - beta1**step)).to(p.dtype)
            if code.numel():
                flat_m[part], absmax[blocks] = _quantized(m, code)
                flat_v[part], absmax_sq[blocks] = _quantized(v, code_sq)

    @adamw_8bit.register_fake
    def _(
        p,
        grad,
        exp_avg,
        exp_avg_sq,
        absmax,
        absmax_sq,
        code,
        code_sq,
        step,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
    ):
        return None

    return adamw_8bit


def _dequantized(codes: Tensor, absmax: Tensor, code: Tensor) -> Tensor:
    scale = absmax.repeat_interleave(BLOCK)[: codes.numel()]
    return code[codes.long()] * scale


def _quantized(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """(uint8 indices into ``code``, largest magnitude of each block) of a flat tensor."""
    padded = F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    absmax = padded.abs().amax(dim=1)
    scaled = (padded / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[: values.numel()]
    between = (code[1:] + code[:-1]) / 2
    return torch.bucketize(scaled, between).to(torch.uint8), absmax


# --- one step -------------------------------------------------------------------------------------


def step(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer],
    batch: dict[str, Tensor] | Tensor | tuple,
    recipe: Recipe,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    mark: Callable[[str], None] = lambda part: None,
    micro_batches: int | None = None,
) -> Tensor:
    """One optimizer step on ``batch``, its rows cut into ``recipe.accumulation`` micro-batches. Returns the mean loss, detached.

    ``batch`` is given to the model as its arguments: a dict by name. ``loss(model, micro_batch)`` returns the scalar to
    minimise; without it the model's own output must hold it (``output.loss``, or the output itself). Micro-batches count
    by their number of labels that are not -100. ``mark`` is called with ``"forward"``, ``"backward"`` and ``"step"``
    before each begins. ``micro_batches`` ends after so many of them: for a prediction, which knows that the rest are alike.
    """
    device = next(model.parameters()).device.type
    scaled = recipe.precision == "autocast-fp16"
    losses = None
    for micro, weight in islice(_micro_batches(model, batch, recipe), micro_batches):
        mark("forward")
        with _autocast(device, recipe):
            value = loss(model, micro) if loss is not None else _loss(model, micro, recipe)
        _check_loss(value, model)
        if weight is not None:
            value = value * weight
        detached = value.detach()
        losses = detached if losses is None else losses + detached
        mark("backward")
        (value * LOSS_SCALE if scaled else value).backward()
        del value, detached
    mark("step")
    if isinstance(optimizer, list):
        return losses  # every parameter has been stepped in backward
    if scaled:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(LOSS_SCALE)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses


def _autocast(device: str, recipe: Recipe) -> AbstractContextManager:
    return torch.autocast(device, dtype=recipe.autocast_dtype) if recipe.autocast_dtype else nullcontext()


def _micro_batches(model: nn.Module, batch, recipe: Recipe) -> Iterator[tuple[Any, Tensor | None]]:
    """Views of equal numbers of rows, each with its share of the labels (``None`` for a batch in one piece)."""
    if recipe.accumulation == 1:
        yield batch, None
        return
    tensors = (
        list(batch.values()) if isinstance(batch, dict) else [batch] if isinstance(batch, Tensor) else batch
    )
    rows = recipe.micro_batch(len(tensors[0]))
    counts = label_counts(model, batch)
    total = None if counts is None else counts.sum()
    for start in range(0, len(tensors[0]), rows):
        part = slice(start, start + rows)
        if isinstance(batch, dict):
            micro = {name: tensor[part] for name, tensor in batch.items()}
        else:
            micro = batch[part] if isinstance(batch, Tensor) else tuple(t[part] for t in batch)
        yield micro, 1 / recipe.accumulation if counts is None else counts[part].sum() / total


def label_counts(model: nn.Module, batch) -> Tensor | None:
    """How many labels of each row count, (rows,): those that are not -100, and after the shift where the model shifts them.

    ``None`` where the batch has no labels by name."""
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if labels is None:
        return None
    counted = labels[:, 1:] if labels.dim() == 2 and predicts_next_token(model) else labels
    counts = counted != IGNORED
    return counts.flatten(1).sum(1) if counted.dim() > 1 else counts.long()


def predicts_next_token(model: nn.Module) -> bool:
    """Whether labels are shifted by one inside the model, as transformers' causal language models do."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _loss(model: nn.Module, batch, recipe: Recipe) -> Tensor:
    if recipe.chunked_loss:
        return chunked_loss(model, batch)
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(output, dict):
        output = output.get("loss")
    return getattr(output, "loss", output)


def _check_loss(value, model: nn.Module) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise ValueError(
            f"{type(model).__name__} returned {what} where a scalar loss was expected: put labels into the batch, or give "
            "loss=lambda model, batch: ... that returns the scalar"
        )


def chunked_loss(model: nn.Module, batch: dict[str, Tensor], items: Tensor | int | None = None) -> Tensor:
    """The loss of a causal language model on ``batch`` (token ids and labels, each (rows, tokens)), its logits in chunks.

    The mean over the predicted tokens, or their sum divided by ``items``, which is how transformers' ``Trainer`` counts
    when it accumulates. ``ValueError`` for a model whose output layer is more than a matrix.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not predicts_next_token(model) or not isinstance(batch, dict) or "labels" not in batch:
        raise ValueError(
            f"chunked_loss is for causal language models with labels in the batch, and this is {type(model).__name__}: leave "
            "chunked_loss out"
        )
    text = model.config.get_text_config()
    if getattr(head, "bias", None) is not None or getattr(text, "final_logit_softcapping", None):
        raise ValueError(
            f"the output layer of {type(model).__name__} does more than multiply (a bias, or capped logits), and chunked_loss "
            "would leave that out: leave chunked_loss out"
        )
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    hidden = model.base_model(**inputs).last_hidden_state
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    mean = chunked_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten())
    return mean if items is None else mean * ((labels != IGNORED).sum() / items)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T`` against ``labels``, holding the logits of ``tokens`` rows at a time.

    ``hidden`` (T, h), ``weight`` (vocab, h), ``labels`` (T,) with -100 for rows that do not count. The gradients are computed
    on the way forward, since a chunk's logits will not come back. torch 2.13's ``F.linear_cross_entropy`` does the same in
    one operator, where nobody can see the bytes of a chunk; here they can be seen, in every version.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, tokens):
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        with torch.autocast(kind, enabled=False):
            matrix = weight.to(dtype)
            wants_hidden, wants_weight = ctx.needs_input_grad[:2]
            d_hidden = torch.empty_like(hidden) if wants_hidden else None
            d_weight = torch.zeros_like(weight) if wants_weight else None
            total = hidden.new_zeros((), dtype=torch.float32)
            count = (labels != IGNORED).sum()
            for start in range(0, len(hidden), tokens):
                rows, target = hidden[start : start + tokens].to(dtype), labels[start : start + tokens]
                counted = (target != IGNORED)[:, None]
                target = target.clamp(min=0)[:, None]
                log_p = (rows @ matrix.T).float().log_softmax(1)
                total -= (log_p.gather(1, target) * counted).sum()
                if not (wants_hidden or wants_weight):
                    continue
                d_logits = log_p.exp_()
                d_logits.scatter_add_(1, target, -torch.ones_like(target, dtype=torch.float32))
                d_logits = d_logits.mul_(counted / count).to(dtype)
                if wants_hidden:
                    d_hidden[start : start + tokens] = d_logits @ matrix
                if wants_weight and d_weight.dtype == dtype:
                    d_weight.addmm_(d_logits.T, rows)  # += would need a second gradient of the matrix's size
                elif wants_weight:
                    d_weight += d_logits.T @ rows
                del log_p, d_logits, rows
        ctx.save_for_backward(d_hidden, d_weight)
        return total / count

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        # In place, for the same reason. A second backward through the same graph is an error then, and not a wrong gradient.
        return (
            None if d_hidden is None else d_hidden.mul_(d_loss.to(d_hidden.dtype)),
            None if d_weight is None else d_weight.mul_(d_loss.to(d_weight.dtype)),
            None,
            None,
        )


# --- models and batches from a config ---------------------------------------------------------------


def model_class(config):
    """The class that trains on ``config``: its first architecture, else the language model, else the image classifier."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in config.architectures or ():
        known = getattr(transformers, name, None)
        if known is not None:
            return known
    tables = ("CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION")
    causal, masked, image = (getattr(auto, f"MODEL_FOR_{t}_MAPPING") for t in tables)
    for table in (masked if type(config) in masked else causal, causal, image):
        if type(config) in table:
            found = table[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise ValueError(
        f"no training class is known for a {type(config).__name__}: language models and image classifiers are. Build the "
        "module yourself and give it with batch={...}, a dict of example tensors (device='meta' costs no memory)"
    )


def example_batch(model: nn.Module, batch_size: int, seq_len: int | None) -> dict[str, Tensor]:
    """What ``model`` trains on: token ids (batch_size, seq_len) as inputs and labels, or images and their classes.

    ``seq_len`` is ignored for images. Random and on the model's device; with fake tensors if fake mode is on.
    """
    config = model.config
    device = next(model.parameters()).device
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if hasattr(config, "image_size") and getattr(model, "main_input_name", "") == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        dtype = next(model.parameters()).dtype
        return {
            "pixel_values": torch.rand(
                batch_size, config.num_channels, height, width, device=device, dtype=dtype
            ),
            "labels": torch.randint(0, config.num_labels, (batch_size,), device=device),
        }
    ids = torch.randint(0, text.vocab_size, (batch_size, seq_len), device=device)
    return {"input_ids": ids, "labels": ids}
