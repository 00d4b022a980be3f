"""Answers to lesson 09's exercises that were once judged wrongly or that nobody had in mind: right
ones in unusual forms, and wrong ones.
"""

import math

import torch
from torch import nn


def quantize_block_by_block(x, code, block):
    indices, absmax, back = [], [], []
    for part in x.split(block):
        largest = part.abs().max()
        nearest = (part[:, None] / largest.clamp(min=1e-30) - code).abs().argmin(1)
        indices.append(nearest.to(torch.uint8))
        absmax.append(largest)
        back.append(code[nearest] * largest)
    return [torch.cat(indices).numpy(), torch.stack(absmax), torch.cat(back).tolist()]


class TwoLayers(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * self.scale


class WithABias(TwoLayers):
    def __init__(self, base, rank, alpha):
        super().__init__(base, rank, alpha)
        self.up = nn.Linear(rank, base.out_features)
        nn.init.zeros_(self.up.weight)


def clip_with_many_backwards(model, loss_of, lr, max_norm):
    trained = [p for p in model.parameters() if p.requires_grad]
    loss, total = loss_of(model), 0.0
    for p in trained:
        total += torch.autograd.grad(loss, p, retain_graph=True)[0].square().sum().item()
    del loss
    factor = min(1.0, max_norm / math.sqrt(total))

    @torch.no_grad()
    def move(p):
        p.sub_(p.grad, alpha=lr * factor)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(move) for p in trained]
    loss_of(model).backward()
    for handle in handles:
        handle.remove()
    return torch.tensor(math.sqrt(total))


def clip_a_list_of_gradients(model, loss_of, lr, max_norm):
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss_of(model), trained)
    norm = torch.stack([g.norm() for g in gradients]).norm()
    with torch.no_grad():
        for p, g in zip(trained, gradients, strict=True):
            p.sub_(g * (max_norm / norm).clamp(max=1.0), alpha=lr)
    return norm.item()


RIGHT = {
    "9.1": [
        quantize_block_by_block,
        "(code[1:] + code[:-1]) / 2) → (code[1:] + code[:-1]).div(2), right=True)",
        "absmax, back → absmax[:, None], back",
    ],
    "9.2": [
        "squares.sum(1), 1 - beta2) → torch.einsum('ij->i', squares), 1 - beta2)",
        "torch.outer(row, column) / row.sum() → (row[:, None] * column / column.sum()).numpy()",
    ],
    "9.3": [
        """m.lerp_(p.grad, 1 - beta2) → self.state[p]["m"] = beta2 * m + (1 - beta2) * p.grad
        setdefault("exp_avg", torch.zeros_like(p)) → get("m", torch.zeros_like(p))""",
        'p.sub_( → self.state[p]["step"] = self.state[p].get("step", 0) + 1; p.sub_(',
        "m.lerp(p.grad, 1 - beta1) → (beta1 * m.float() + (1 - beta1) * p.grad.float())",
    ],
    "9.4": [
        clip_with_many_backwards,
        "p.grad.square().sum().item() → p.grad.norm(dtype=torch.float64) ** 2",
        "p.add_(p.grad, alpha=-lr * factor) → torch.optim.SGD([p], lr * factor).step()",
    ],
    "9.5": [
        TwoLayers,
        """torch.randn(rank, base.in_features) → torch.randn(base.in_features, rank)
        torch.zeros(base.out_features, rank) → torch.zeros(rank, base.out_features)
        F.linear(F.linear(x, self.A), self.B) → (x @ self.A @ self.B)""",
    ],
    "9.6": [
        lambda n, b, g: torch.tensor(math.ceil(n / 2) + -(-n // b) + 4 * (1 - (-n // b) // g)),
    ],
    "9.7": [
        """ctx.save_for_backward(hidden.grad, weight.grad) → ctx.kept = hidden.grad, weight.grad
        gradient * d_loss for gradient in ctx.saved_tensors → g.mul_(d_loss) for g in ctx.kept""",
        """hidden[i : i + 64], weight → hidden[i : i + 40], weight
        labels[i : i + 64] → labels[i : i + 40]
        range(0, len(hidden), 64) → range(0, len(hidden), 40)""",
    ],
    "9.8": [
        'optimizer="adafactor-torch" → optimizer="sgd"',
        "(12, every_weight), (40, adapters) → [12.0, every_weight], [torch.tensor(40), adapters]",
        "lora_rank=16 → lora_rank=16, lora_targets=('q_proj', 'k_proj', 'v_proj', 'o_proj', "
        "'gate_proj', 'up_proj', 'down_proj')",
    ],
    "9.9": [
        """(G, full_matrices=False) → (G); U = torch.linalg.eigh(G @ G.T)[1].flip(1)
        else Vh[:rank].T → else torch.linalg.eigh(G.T @ G)[1][:, -rank:]""",
        "torch.linalg.svd(G, → torch.linalg.svd(-G,",
        'state["call"] = state.get("call", -1) + 1 → state["t"] = state.get("t", -1) + 1',
        "adam_update(small, state) → adam_update(small.float(), state).double()",
    ],
}
WRONG = {
    "9.1": [
        """absmax.clamp(min=1e-30)[:, None] → absmax[:, None]
        (code[indices] * absmax[:, None]) → (code[indices] * absmax[:, None]).nan_to_num()""",
        "min=1e-30 → min=1e-8",
        ".to(torch.uint8) → .to(torch.int8)",
        "rows.abs().amax(dim=1) → rows.amax(dim=1).clamp(min=0)",
        "absmax, back → absmax.bfloat16(), back",
        "code[indices] * absmax[:, None] → rows",
        "absmax, back → absmax",
    ],
    "9.2": [
        "row.lerp_ → row.lerp",
        "torch.outer(row, column) → torch.outer(column, row)",
        "/ row.sum() → / squares.sum()",
        """grad.square() + eps → grad.square()
        squares.sum(1), → squares.sum(1) + eps,
        squares.sum(0), → squares.sum(0) + eps,""",
        "torch.outer(row, column) / row.sum() → range(10**12)",
    ],
    "9.3": [
        'self.state[p].setdefault("exp_avg" → self.defaults.setdefault(p, {}).setdefault("exp_avg"',
        """self.state[p].setdefault("exp_avg" → vars(p).setdefault("m"
        p.mul_( → self.state[p]["exp_avg"] = m; p.mul_(""",
        "m.lerp_(p.grad, 1 - beta2) → m.lerp_(p.grad, 1 - beta2); p.copy = m.clone()",
        "is not None → is not None and p.grad.any()",
        'in group["params"] → in __import__("itertools").takewhile(lambda p: p.grad is not None, '
        'group["params"])',
        ".sign() → .div(m.lerp(p.grad, 1 - beta1).abs())",
        "m.lerp_(p.grad, 1 - beta2) → m.lerp_(p.grad, 1 - beta2); p.grad.zero_()",
    ],
    "9.4": [
        clip_a_list_of_gradients,
        "p.grad.square().sum() → p.grad.bfloat16().square().sum()",
        "if p.requires_grad → if p.requires_grad and p.ndim == 2",
        "p.grad = None → p.grad.zero_()",
        "p.grad = None → torch.stack([p.grad] * 4); p.grad = None",
        "return norm → return norm * factor",
        "handle.remove() → handle",
    ],
    "9.5": [
        WithABias,
        "self.base(x) → self.base(x).detach()",
        "F.linear(x, self.A) → F.linear(x.detach(), self.A)",
        "self.base(x) → F.linear(x, self.base.weight)",
        "torch.randn(rank, base.in_features) → torch.ones(rank, base.in_features)",
        "= base.requires_grad_(False) → = copy.deepcopy(base).requires_grad_(False)",
        "F.linear(F.linear(x, self.A), self.B) → F.linear(x, self.B @ self.A)",
    ],
    "9.6": [
        "-(-numbers // 2) → numbers // 2",
        "-(-blocks // group) → (blocks // group)",
        "-(-blocks // group) → (blocks // group + 1)",
        lambda n, b, g: n * (0.5 + 1 / b + 4 / (b * g)) + 4,
    ],
    "9.7": [
        """ctx.save_for_backward(hidden.grad, weight.grad) → F.kept = hidden.grad, weight.grad
        ctx.saved_tensors → F.kept""",
        "return total → labels.clamp_(min=0); return total",
        "gradient * d_loss for → gradient * d_loss + 0 * gradient @ gradient.T @ gradient for",
        "gradient * d_loss for → gradient * d_loss * d_loss for",
        "(labels != -100) → (labels > 0)",
        """hidden[i : i + 64], weight → hidden[i : i + 600], weight
        labels[i : i + 64] → labels[i : i + 600]
        range(0, len(hidden), 64) → range(0, len(hidden), 600)""",
    ],
    "9.8": [
        '"chunked_loss": True → "chunked_loss": False',
        "in_backward=True → in_backward=False",
        "(12, every_weight) → (11, every_weight)",
        "(12, every_weight), (40, adapters) → (40, adapters), (40, adapters)",
        "lora_rank=16 → lora_rank=16, lora_targets=('q_proj',)",
        "(12, every_weight), (40, adapters) → every_weight",
    ],
    "9.9": [
        'state["P"] = ( → state.get("adam_update", {}).pop("m", None); state["P"] = (',
        "call % every == 0 → call % every == min(call, 1)",
        """U, _, Vh = torch.linalg.svd(G, full_matrices=False) → U = torch.linalg.qr(G).Q
        else Vh[:rank].T) → else torch.linalg.qr(G.T).Q[:, :rank])""",
        'update = adam → state["small"] = small; update = adam',
        "Vh[:rank] → Vh[:2]",
        "lr * scale * ( → lr * (",
    ],
}
