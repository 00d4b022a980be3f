"""Answers to lesson 01's exercises that were once judged wrongly or that nobody had in mind: right
ones in unusual forms, and wrong ones.
"""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gradmem_lib.course.lessons.lesson_01.exercises import gpt2_block, saved_bytes
from gradmem_lib.course.material import models


def measured(model):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found = {"parameters": sum(p.nbytes for p in model.parameters()), "gradients": 0}
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
            found["gradients"] += p.grad.nbytes
    optimizer.step()
    states = optimizer.state.values()
    found["optimizer"] = sum(tensor.nbytes for state in states for tensor in state.values())
    model.zero_grad()
    return found


def keeps_the_tensors_itself(model, x):
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor

    with saved_tensors_hooks(pack, lambda packed: packed):
        model(x)
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in own)


def counts_in_backward(model, x):
    found = {}

    def unpack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    x = x.clone().requires_grad_()
    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(model(x).float().sum(), trained, allow_unused=True)
    for p in model.parameters():
        found.pop(p.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in found.values())


def outputs_of_modules(model, x):
    sizes = []
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_hook(lambda *seen: sizes.append(seen[2].nbytes)))
    model(x)
    for hook in hooks:
        hook.remove()
    return sum(sizes)


def skips_the_weights_storages(model, x):
    """Its key is the address of a view."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(found.values())


def with_a_closure(model, optimizer, batches):
    losses = []
    for ids in batches:

        def closure(ids=ids):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))
        optimizer.zero_grad()
    return losses


def in_halves(model, optimizer, batches):
    """Its gradients have another rounding."""
    losses = []
    for ids in batches:
        total = 0.0
        for part in ids.chunk(2):
            loss = model(input_ids=part, labels=part).loss / 2
            total += loss.item()
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def of_a_real_block(batch, seq_len, hidden, heads):
    """Each storage counts for the innermost module that saves it first."""
    sizes = {"hidden": hidden, "heads": heads, "vocab": 16, "positions": 64}
    gpt2 = models.tiny_gpt2(layers=1, **sizes, activation="gelu_pytorch_tanh", dropout=0.1)
    block, inside, first = gpt2.transformer.h[0], [], {}
    for name, module in block.named_modules():
        if name:
            module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
            module.register_forward_hook(lambda *_: inside.pop() and None)

    def pack(tensor):
        storage = tensor.untyped_storage()
        first.setdefault(storage.data_ptr(), (inside[-1], storage.nbytes()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(torch.randn(batch, seq_len, hidden, requires_grad=True))
    for p in block.parameters():
        first.pop(p.untyped_storage().data_ptr(), None)
    del out
    rows = dict.fromkeys(gpt2_block(1, 1, 1, 1), 0)
    for name, nbytes in first.values():
        rows[name] += nbytes
    return rows


def of_a_real_mlp(tokens, hidden, training):
    layers = [nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Dropout(0.1)]
    layers += [nn.Linear(4 * hidden, hidden), nn.Dropout(0.1)]
    x = torch.randn(tokens, hidden, requires_grad=True)
    return saved_bytes(nn.Sequential(*layers).train(training), x)


RIGHT = {
    "1.1": [
        measured,
        "list(model.parameters()) → list(dict(model.named_parameters()).values())",
        "p.numel() * p.element_size() for p in parameters → float(p.nbytes) for p in parameters",
    ],
    "1.2": [
        keeps_the_tensors_itself,
        counts_in_backward,
        "return tensor → return tensor.detach()",
        """return tensor → return storage, tensor
        lambda tensor: tensor → lambda packed: packed[1]""",
        "return sum(saved.values()) → return torch.tensor(list(saved.values())).sum()",
    ],
    "1.3": [
        "4 * batch * heads * seq_len * seq_len → torch.ones(batch, heads, seq_len, seq_len).nbytes",
        "softmax - log_sum_exp → 4.0 * batch * heads * seq_len * (seq_len - 1)",
        "softmax - log_sum_exp → 8 * batch * heads * sum(range(seq_len))",
    ],
    "1.4": [
        "3 * 4 * batch * seq_len * vocab → 3 * (batch * seq_len * vocab << 2)",
        "3 * 4 → 12.0",
        'return → return 3 * torch.empty(batch, seq_len, vocab, device="meta").nbytes or',
    ],
    "1.5": [
        # the names that two recipes had at first
        """"autocast-bf16": → "autocast":
        "float32-master": → "float32 master":""",
        "2 + 2 + 4 + 8 → torch.tensor(16)",
        '"bf16": 2 + 2 + 4 → "bf16": 8.0',
    ],
    "1.6": [
        with_a_closure,
        in_halves,
        "del loss →",
        "loss.item() → loss.detach()",
        "return losses → return torch.tensor(losses)",
        """losses.append(loss.item()) →
        del loss → losses.append(float(loss))""",
    ],
    "1.7": [
        of_a_real_block,
        "4 * numbers → 4.0 * numbers",
        "in rows.items() → in reversed(rows.items())",
    ],
    "1.8": [
        of_a_real_mlp,
        "return 4 * numbers → return torch.tensor(4 * numbers)",
        "4 * numbers → 4 * x * (14 if training else 5)",
    ],
    "1.9": [
        "(loss.item(), out.mean().item()) → (loss.detach().clone(), out.detach().mean())",
        "return 9 → return torch.tensor(9)",
        "return history → import gc; gc.collect(); return torch.tensor(history)",
        "in batches → in iter(batches)",
    ],
}
WRONG = {
    "1.1": [
        "list(model.parameters()) → [*model.parameters(), *model.buffers()]",
        "element_size() for p in parameters → element_size() for p in model.state_dict().values()",
        # the first weight's dtype for all of them
        """p.element_size() for p in trained → parameters[0].element_size() for p in trained
        p.element_size() for p in parameters → parameters[0].element_size() for p in parameters""",
        "4 * len(trained) → 4 * len(parameters)",
        "4 * len(trained) → sum(p.element_size() for p in trained)",
        # gradients stay
        "return { → return [setattr(p, 'grad', torch.ones_like(p)) for p in trained] and {",
        "for p in parameters), → for p in parameters), 'buffers': 0,",
        "if p.requires_grad → if p.requires_grad and p.ndim > 1",
    ],
    "1.2": [
        outputs_of_modules,
        skips_the_weights_storages,
        "return tensor → return None",
        "in model.parameters() → in [*model.parameters(), *model.buffers()]",
        "in model.parameters() → in filter(lambda p: p.requires_grad, model.parameters())",
        "saved = {} → saved, x = {}, x.clone().requires_grad_()",
        "data_ptr(), None) → data_ptr())",
        "return sum → model(x).float().sum().backward(); return sum",
    ],
    "1.3": [
        "softmax - log_sum_exp → 16_744_448",
        "heads * seq_len * seq_len → heads * heads * seq_len * seq_len",
        "softmax - log_sum_exp → softmax - log_sum_exp / 2",
        "softmax - log_sum_exp → softmax + 3 * log_sum_exp",
        "softmax - log_sum_exp → (softmax - log_sum_exp) / 1024",
    ],
    "1.4": [
        "* vocab → + vocab",
        "3 * 4 * batch * seq_len → 3 * 4 * batch * seq_len * seq_len",
        "3 * 4 * batch → 12",
        "3 * 4 → 10",
        "return → return [] and",
    ],
    "1.5": [
        "[recipe] → ['float32']",
        "2 + 2 + 4 + 8 → 2 + 4 + 4 + 8",
        '"autocast-bf16": 4 + 4 → "autocast-bf16": 4 + 2',
        '"bf16": 2 + 2 + 4 → "half": 8',
        '"float32": 4 + 4 + 8 → "float32": "16"',
    ],
    "1.6": [
        "optimizer.step() → len(losses) < 3 and optimizer.step()",
        "loss.backward() → (loss / 3).backward()",
        "return losses → [p.data.mul_(0.999) for p in model.parameters()]; return losses",
        "losses = [] → losses = []; optimizer = type(optimizer)(model.parameters(), lr=0.01)",
        "losses = [] → return [7.6373, 7.62605, 7.66122]",
        "loss.item() → loss",
        "loss = model → kept = losses and model(input_ids=ids).logits; loss = model",
        "loss.item() → round(loss.item(), 2)",
        "del loss → return losses",
    ],
    "1.7": [
        '"mlp.act": 4 * x → "mlp.act": x',
        '"ln_2": x + 2 * tokens → "ln_2": 0',
        '"attn": 4 * x + tokens → "attn": 3 * x + tokens',
        "return { → return {'total': 0} | {",
        "4 * numbers → 2 * numbers",
        "tokens = batch → tokens = 1",
    ],
    "1.8": [
        "return 4 * numbers → return 4 * numbers * training",
        "4 * numbers → 4 * numbers + 32 * hidden * hidden",
        "4 * numbers → 2 * numbers",
        "if training → if training is None",
        "+ dropped + last_mask →",
    ],
    "1.9": [
        # what no tracker sees
        """(loss.item(), out.mean().item()) → (loss.item(), out.detach().numpy().copy())
        return history → return [(loss, out.mean()) for loss, out in history]""",
        """(loss.item(), out.mean().item()) → (loss.detach(), out.detach())
        return history → return [(loss.item(), out.mean().item()) for loss, out in history]""",
        "optimizer.zero_grad() →",
        "out = model(x) → x, y = x[:128], y[:128]; out = model(x)",
        "return history → model.eval(); return history",
        "return history → return history[:24] if len(batches) == 24 else []",
        "return 9, fixed → return fixed, 9",
        "return 9, fixed → return 9, fixed.__name__",
        "return 9 → return 3",
    ],
}
