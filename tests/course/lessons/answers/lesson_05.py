"""Answers to lesson 05's exercises in unusual forms, and wrong ones that only one case catches, or
that were once let pass.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from gradmem_lib import LoRALinear, count_targets, next_token_loss, split
from gradmem_lib.course.lessons.lesson_05.exercises_leak import train_on

# 5.2


def wraps_each_layer(model, cache=False):
    model.train()
    model.config.use_cache = cache
    for layer in model.model.layers:
        layer.forward = checkpointed(layer.forward)


def checkpointed(forward):
    def run(*args, **more):
        return checkpoint(forward, *args, use_reentrant=False, **more)

    return run


def wraps_the_model(model):
    model.train()
    model.model.forward = checkpointed(model.model.forward)


# 5.3


def by_hand(optimizer, micro_batches, window, warmup, accumulate):
    [group] = optimizer.param_groups
    rate = group["lr"]
    updates = -(-len(micro_batches) // window)
    warm = round(warmup * updates)
    for i in range(updates):
        fall = (updates - i) / (updates - warm)
        group["lr"] = rate * min(i / warm, fall)
        accumulate(micro_batches[i * window : (i + 1) * window])
        optimizer.step()
        optimizer.zero_grad()


def scheduled_by(schedule_of):
    def train_epoch(optimizer, micro_batches, window, warmup, accumulate):
        updates = -(-len(micro_batches) // window)
        schedule = schedule_of(optimizer, round(warmup * updates), updates)
        while micro_batches:
            accumulate(micro_batches[:window])
            micro_batches = micro_batches[window:]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return train_epoch


# 5.4


def by_sums(model, window):
    total = sum(count_targets(micro["labels"]) for micro in window)
    logged = torch.zeros(())
    for micro in window:
        loss = next_token_loss(model, micro)[0] / total
        loss.backward()
        logged += loss.detach()
        del loss
    return logged


# 5.6


def by_children(model, names, rank, lr):
    model.requires_grad_(False)
    for module in list(model.modules()):
        for own, child in list(module.named_children()):
            if own in names:
                module.set_submodule(own, LoRALinear(child, rank))
    return torch.optim.AdamW(model.parameters(), lr)


# 5.7


def row_by_row(model, rows):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    total = 0.0
    with torch.inference_mode():
        for row in split(rows, 1):
            given = {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]}
            logits = model(**given, use_cache=False).logits
            total += F.cross_entropy(logits[0, :-1], row["labels"][0, 1:], reduction="sum")
    for module, mode in modes.items():
        module.training = mode
    return total / count_targets(rows["labels"])


# 5.9


def all_in_the_last_hook(model, lr, steps):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / steps)
    ready = []

    def hook(p):
        ready.append(p)
        if len(ready) == len(trained):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            ready.clear()

    for p in trained:
        p.register_post_accumulate_grad_hook(hook)
    return LayerWiseDummyOptimizer(lr=lr)


# 5.10


def block_by_block(way, **more):
    def same_step(model, optimizer, batch):
        x = batch["x"]
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=way, **more)
        loss = F.cross_entropy(model.head(x), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return same_step


def in_halves(model, optimizer, batch):
    total = 0.0
    for micro in split(batch, 32):
        loss = F.cross_entropy(model(micro["x"]), micro["labels"]) / 2
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


# 5.11


def loads(model, optimizer, file):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def in_a_function(model, optimizer, file, batches):
    return train_on(model, optimizer, batches[loads(model, optimizer, file) :])


def by_arrays(model, optimizer, file, batches, kept=False):
    saved = torch.load(file)
    start = saved["step"]
    optimizer.load_state_dict(saved["optimizer"])
    arrays = {name: weight.numpy().copy() for name, weight in saved.pop("model").items()}
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    if not kept:
        del arrays
    return train_on(model, optimizer, batches[start:])


CAST = "model.float() → "
RIGHT = {
    "5.1": [
        "range(1, fits + 1) → range(fits, 0, -1)",
        "batch // micro → batch / micro",
        "arguments | new → {k: torch.tensor(v).double() for k, v in {**arguments, **new}.items()}",
    ],
    "5.2": [wraps_each_layer, "model.train() →\nFalse}) → False}); model.train()"],
    "5.3": [
        by_hand,
        "accumulate(micro → accumulate(torch.stack(micro\nwindow]) → window]))",
        "zero_grad() → zero_grad(set_to_none=False)",
    ],
    "5.4": [
        by_sums,
        "loss.item() → loss.detach()",
        "return logged → nn.utils.clip_grad_norm_(model.parameters(), math.inf); return logged",
    ],
    "5.5": [
        CAST + "model.to(torch.float32)",
        CAST + "[setattr(p, 'data', p.data.float()) for p in model.parameters()]",
        "lr=lr) → lr=lr, fused=True)",
    ],
    "5.6": [by_children, "own in names → path.endswith(tuple(names))"],
    "5.7": [row_by_row, "split(rows, 4) → split(rows, 3)", "return → return torch.ones(()) *"],
    "5.9": [
        "lr=lr) for → lr=lr, fused=True) for",
        "return LayerWise → return torch.optim.SGD([torch.zeros(1)], lr); return LayerWise",
    ],
    "5.10": [
        block_by_block(False),
        "every=1 → every=2",
        "loss.backward() →\noptimizer.step() → loss.backward(); optimizer.step()",
        "zero_grad() → zero_grad(set_to_none=False)",
        "loss.item() → loss.detach()",
    ],
    "5.11": [
        lambda: (2, in_a_function),
        lambda: (2, by_arrays),
        'saved["model"]) → saved.pop("model"))\ndel saved →',
        "del saved → saved.clear()",
        "saved = torch.load(file) → torch.load(file); file.seek(0); saved = torch.load(file)",
    ],
}
WRONG = {
    "5.1": [
        "return arguments | new → arguments.update(new); return arguments",
        "batch % m == 0) → batch % m == 0 and m & (m - 1) == 0)",
        "range(1, fits + 1) → range(1, min(fits, arguments[train]) + 1)",
        'arguments | new → arguments | new | {"learning_rate": arguments["learning_rate"] / gpus}',
        "return arguments | new → return new",
        '"per_device_eval_batch_size": micro → "per_device_eval_batch_size": fits',
    ],
    "5.2": [
        wraps_the_model,
        lambda model: wraps_each_layer(model, cache=True),
        "model.train() → model.train(); model.model.layers = model.model.layers[:2]",
        "model.train() → model.train(); model.get_input_embeddings().requires_grad_(False)",
        "model.train() → model.train(); torch.set_grad_enabled(False)",
    ],
    "5.3": [
        scheduled_by(get_cosine_schedule_with_warmup),
        scheduled_by(lambda optimizer, warm, _: get_constant_schedule_with_warmup(optimizer, warm)),
        "optimizer.zero_grad() →\noptimizer.step() → optimizer.zero_grad(); optimizer.step()",
        "range(0, len(micro_batches), window) → range(0, len(micro_batches) - window + 1, window)",
        'schedule.step() → schedule.step(); optimizer.param_groups[0]["weight_decay"] = 0.3',
        "range(0, len(micro_batches), window) → [0, *range(0, len(micro_batches), window)]",
    ],
    "5.4": [
        "return logged → nn.utils.clip_grad_norm_(model.parameters(), 10.0); return logged",
        "return logged → nn.utils.clip_grad_value_(model.parameters(), 1.0); return logged",
        "model(**micro).loss → (micro.update(kept=model(**micro)) or micro['kept']).loss",
        'count_targets(micro["labels"]) → len(micro["labels"])',
        "loss.item() → loss.item() * sum(counts)",
    ],
    "5.5": [
        CAST + "model.double()",
        CAST + "model.lm_head.float()",
        CAST + "model.float(); batches = batches[::-1]",
        "lr=lr) → lr=lr, amsgrad=True)",
        "torch.optim.AdamW → torch.optim.Adam",
        "dtype=torch.bfloat16 → dtype=torch.float16",
        "return → model.bfloat16(); return",
        "loss.backward() → optimizer = type(optimizer)(model.parameters(), lr=lr); loss.backward()",
        "loss.backward() → loss.backward(); nn.utils.clip_grad_norm_(model.parameters(), 1e-6)",
    ],
    "5.6": [
        "LoRALinear(layer, rank) → LoRALinear(layer, 4)",
        "torch.optim.AdamW → torch.optim.Adam",
        "trained = → model.lm_head.requires_grad_(True); trained =",
        "own in names → any(name in path for name in names) and isinstance(layer, nn.Linear)",
        'own in names → own in names and (".0." in path or own == "lm_head")',
        "p.requires_grad] → p.requires_grad and len(p) != rank]",
        "AdamW(trained, → AdamW(trained[:2],",
        "AdamW(trained, → AdamW(trained[:-1],",
    ],
    "5.7": [
        "torch.no_grad() → torch.no_grad(), torch.autocast('cpu', torch.bfloat16)",
        "split(rows, 4) → split(rows, 5)",
        'return total / count_targets(rows["labels"]) → return total',
        "model.eval() → model.eval(); model.config.use_cache = False",
        "torch.no_grad() → torch.enable_grad()\nmodel.eval() → model.eval().requires_grad_(False)",
        'total / count_targets(rows["labels"]) → math.exp(total / count_targets(rows["labels"]))',
    ],
    "5.9": [
        all_in_the_last_hook,
        "lr=lr) for → lr=lr, weight_decay=0.0) for",
        "if p.requires_grad → if p.requires_grad and p.dim() == 1",
        "return LayerWise → return list(optimizers.values()); return LayerWise",
        "0, steps) → 0, 3)",
    ],
    "5.10": [
        in_halves,
        block_by_block(True),
        block_by_block(False, preserve_rng_state=False),
        "loss = → torch.rand(3); loss =",
        'model(batch["x"]) → torch.autocast("cpu", torch.bfloat16)(model)(batch["x"])',
        "return → model.eval(); return",
    ],
    "5.11": [
        lambda: (2, lambda *given: by_arrays(*given, kept=True)),
        "rest = → data = file.getvalue()[:-1]; rest =",
        "saved = torch.load(file) → saved = torch.load(file); weights = saved['model']",
        'saved["step"] :] → 2:]',
        "del saved → del saved; model.eval()",
    ],
}
