"""Answers to the exercises of lesson 09 about adapters, 4 bits and the loss as people write them;
see answers_numbers.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from gradmem_lib import LoRALinear, Recipe

RIGHT, WRONG = {}, {}


class _LoRA(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


class _LoRALayers(nn.Module):
    """With layers, as PEFT has them."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad = False
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.alpha, self.rank = alpha, rank

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * (self.alpha / self.rank)


class _LoRATransposed(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.A = nn.Parameter(self.A.detach().T.contiguous())
        self.B = nn.Parameter(self.B.detach().T.contiguous())

    def forward(self, x):
        return self.base(x) + (x @ self.A @ self.B).mul(self.scale)


class _LoRABRandom(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        nn.init.normal_(self.B, std=0.02)


class _LoRAZeros(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        nn.init.zeros_(self.A)


class _LoRAAlpha(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.scale = alpha


class _LoRANoScale(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.scale = 1.0


class _LoRATrainsAll(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        base.requires_grad_(True)


class _LoRAWritten(_LoRA):
    def forward(self, x):
        return F.linear(x, self.base.weight + self.scale * (self.B @ self.A), self.base.bias)


class _LoRATensors(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        a, b = self.A.detach(), self.B.detach()
        del self.A, self.B
        self.A, self.B = a, b


class _LoRAAlone(_LoRA):
    def forward(self, x):
        return self.scale * (x @ self.A.T @ self.B.T)


class _LoRAFrozenA(_LoRA):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.A.requires_grad_(False)


class _LoRACopied(_LoRA):
    def __init__(self, base, rank, alpha):
        fresh = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
        super().__init__(fresh, rank, alpha)


RIGHT["9.5"] = {
    "matrices": _LoRA,
    "layers": _LoRALayers,
    "transposed": _LoRATransposed,
    "the course's": LoRALinear,
}
WRONG["9.5"] = {
    "B random": (_LoRABRandom, "B.*zero|before its first"),
    "both zero": (_LoRAZeros, "both|A"),
    "alpha": (_LoRAAlpha, "rank"),
    "no scale": (_LoRANoScale, "alpha"),
    "all trained": (_LoRATrainsAll, "base"),
    "written out": (_LoRAWritten, "matrix|bytes"),
    "tensors": (_LoRATensors, "nn.Parameter"),
    "alone": (_LoRAAlone, "base"),
    "A frozen": (_LoRAFrozenA, "A|numbers"),
    "another base": (_LoRACopied, "base"),
}


def _nf4(n, block, group):
    blocks = math.ceil(n / block)
    return math.ceil(n / 2) + blocks + 4 * math.ceil(blocks / group) + 4


RIGHT["9.6"] = {
    "ceil": _nf4,
    "floor of the negative": lambda n, b, g: -(-n // 2) + -(-n // b) + 4 * (1 - (-n // b) // g),
    "tensors": lambda n, b, g: torch.tensor(_nf4(n, b, g)),
    "loop": lambda n, b, g: (
        len(range(0, n, 2)) + len(range(0, n, b)) + 4 * len(range(0, len(range(0, n, b)), g)) + 4
    ),
}
WRONG["9.6"] = {
    "once": (lambda n, b, g: -(-n // 2) + 4 * -(-n // b), "float32|double|byte"),
    "no offset": (lambda n, b, g: _nf4(n, b, g) - 4, "mean|offset|4 bytes"),
    "rounded down": (lambda n, b, g: n // 2 + n // b + 4 * (n // b // g) + 4, "up|last"),
    "a byte each": (lambda n, b, g: _nf4(n, b, g) - -(-n // 2) + n, "half|4 bits|two"),
    "groups of weights": (lambda n, b, g: -(-n // 2) + -(-n // b) + 4 * -(-n // g) + 4, "group"),
    "half": (
        lambda n, b, g: _nf4(n, b, g) - 2 * math.ceil(math.ceil(n / b) / g),
        "float32|4 bytes|2 bytes",
    ),
    "a mean": (lambda n, b, g: n * (0.5 + 1 / b + 4 / (b * g)), "whole|fraction"),
    "bits": (lambda n, b, g: 8 * _nf4(n, b, g), "8 times"),
}


class _Chunked(torch.autograd.Function):
    """Gradients on the way forward, by autograd itself, a chunk at a time."""

    size, mean, capped, upstream = 100, True, True, True

    @staticmethod
    def logits(rows, weight, cap):
        return cap * torch.tanh(rows @ weight.T / cap)

    @classmethod
    def made(cls, ctx, hidden, weight, labels, cap):
        count = (labels != -100).sum()
        total, d_hidden, d_weight = 0.0, torch.zeros_like(hidden), torch.zeros_like(weight)
        for i in range(0, len(hidden), cls.size):
            with torch.enable_grad():
                rows = hidden[i : i + cls.size].detach().requires_grad_()
                matrix = weight.detach().requires_grad_()
                logits = cls.logits(rows, matrix, cap)
                loss = F.cross_entropy(logits, labels[i : i + cls.size], reduction="sum") / count
                a, b = torch.autograd.grad(loss, (rows, matrix))
            d_hidden[i : i + cls.size] = a
            d_weight += b
            total += loss.detach()
            del logits, loss, a, b
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def forward(ctx, hidden, weight, labels, cap):
        return _Chunked.made(ctx, hidden, weight, labels, cap)

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_loss, d_weight * d_loss, None, None


def _by_hand(
    *,
    cap_in_gradient=True,
    count=lambda labels: (labels != -100).sum(),
    capped=True,
    size=64,
    masked=True,
    chunk_mean=False,
    keeps_on=None,
):
    def forward(ctx, hidden, weight, labels, cap):
        n = count(labels)
        total, d_hidden, d_weight = (
            hidden.new_zeros(()),
            torch.empty_like(hidden),
            torch.zeros_like(weight),
        )
        chunks = math.ceil(len(hidden) / size)
        for i in range(0, len(hidden), size):
            rows, target = hidden[i : i + size], labels[i : i + size]
            t = torch.tanh(rows @ weight.T / cap) if capped else None
            log_p = (cap * t if capped else rows @ weight.T).log_softmax(1)
            good = (
                (target != -100)[:, None]
                if masked
                else torch.ones_like(target, dtype=bool)[:, None]
            )
            share = 1 / (good.sum() * chunks) if chunk_mean else 1 / n
            index = target.clamp(min=0)[:, None]
            total -= (log_p.gather(1, index) * good).sum() * share
            d = log_p.exp_()
            d.scatter_add_(1, index, -torch.ones_like(index, dtype=d.dtype))
            d *= good * share
            if capped and cap_in_gradient:
                d *= 1 - t * t
            d_hidden[i : i + size] = d @ weight
            d_weight.addmm_(d.T, rows)
            del t, log_p, d
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    return forward


def _function(forward, backward=_Chunked.backward):
    return type(torch.autograd.Function)(
        "ChunkedLoss",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


def _whole(ctx, hidden, weight, labels, cap):
    with torch.enable_grad():
        rows, matrix = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = F.cross_entropy(_Chunked.logits(rows, matrix, cap), labels)
        ctx.save_for_backward(*torch.autograd.grad(loss, (rows, matrix)))
    return loss.detach()


def _backward_in_place(ctx, d_loss):
    return *(saved.mul_(d_loss) for saved in ctx.saved_tensors), None, None


RIGHT["9.7"] = {
    "autograd a chunk": _Chunked,
    "by hand": _function(_by_hand()),
    "in place": _function(_by_hand(size=50), _backward_in_place),
}
WRONG["9.7"] = {
    "whole": (_function(_whole), "bytes"),
    "chunk too large": (_function(_by_hand(size=600)), "bytes"),
    "cap not derived": (_function(_by_hand(cap_in_gradient=False)), "tanh"),
    "no cap": (_function(_by_hand(capped=False)), "cap"),
    "upstream": (
        _function(_by_hand(), lambda ctx, d: (*ctx.saved_tensors, None, None)),
        "backward",
    ),
    "all rows": (_function(_by_hand(count=len)), "-100|ignored"),
    "unmasked": (_function(_by_hand(masked=False)), "-100|ignored"),
    "means": (_function(_by_hand(chunk_mean=True)), "mean"),
    "sum": (_function(_by_hand(count=lambda labels: 1)), "sum|divide|tokens|times"),
    "hidden alone": (
        _function(_by_hand(), lambda ctx, d: (ctx.saved_tensors[0] * d, None, None, None)),
        "weight",
    ),
}

_FULL = dict(
    precision="bf16",
    optimizer="adafactor-torch",
    in_backward=True,
    checkpointing="per-layer",
    chunked_loss=True,
)
_LORA = dict(
    precision="bf16",
    optimizer="adamw",
    lora_rank=16,
    quantized_base=True,
    checkpointing="per-layer",
    chunked_loss=True,
)


def _under(full=None, lora=None, layers=12, deep=40):
    pair = (layers, Recipe(**_FULL | (full or {}))), (deep, Recipe(**_LORA | (lora or {})))
    return lambda: pair


RIGHT["9.8"] = {
    "the usual": _under(),
    "SGD, and AdamW in 8 bits": _under({"optimizer": "sgd"}, {"optimizer": "adamw-8bit"}),
    "lists, in pieces": lambda: [list(pair) for pair in _under(None, {"accumulation": 4})()],
}
WRONG["9.8"] = {
    "AdamW": (_under({"optimizer": "adamw"}), "states"),
    "float32": (_under({"precision": "float32"}), "float32|weights"),
    "accumulated": (_under({"in_backward": False, "accumulation": 8}), "gradients"),
    "logits": (_under({"chunked_loss": False}), "logits|loss"),
    "few layers": (_under(layers=8), "12"),
    "16 bits": (_under(None, {"quantized_base": False}), "4 bits|quantized"),
    "not adapters": (lambda: (_under()()[0], _under()()[0]), "lora_rank|adapters"),
    "adapters twice": (lambda: (_under()()[1], _under()()[1]), "every weight"),
    "not checkpointed": (_under(None, {"checkpointing": None}), "checkpoint"),
    "another rank": (_under(None, {"lora_rank": 4}), "16"),
    "attention alone": (
        _under(None, {"lora_targets": ("q_proj", "v_proj")}),
        "all linear|every linear",
    ),
    "one": (lambda: Recipe(**_FULL), "two"),
}
