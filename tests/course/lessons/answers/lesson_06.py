"""Answers to lesson 06's exercises that were once judged wrongly or that nobody had in mind: right
ones in unusual forms, and wrong ones.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gradmem_lib import accumulate_gradients, checkpoint_layers, split
from gradmem_lib.course.lessons.lesson_06 import exercises


def in_steps(asked, total, free, process, allocated, idle):
    used = total - free
    found = {"others": used - process, "in_pieces": torch.tensor(free + idle) >= asked}
    return found | {"context": torch.tensor(process - (allocated + idle))}


def in_whole_bytes(moments, rows, new):
    peaks = []
    for phase, parts in moments.items():
        parts = dict(parts)
        if phase != "optimizer_step":
            for name in ("activations", "temporaries", "other"):
                parts[name] = parts[name] * new // rows
        peaks.append(sum(parts.values()))
    return torch.tensor(peaks).max()


def only_the_peak(moments, rows, new):
    peak = max(moments, key=lambda phase: sum(moments[phase].values()))
    return in_whole_bytes({peak: moments[peak]}, rows, new)


def checkpointed(model, optimizer, images, labels):
    with checkpoint_layers(model.blocks, 1):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def by_hand(model, optimizer, images, labels):
    own = [block.forward for block in model.blocks]
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    for block, forward in zip(model.blocks, own, strict=True):
        block.forward = forward
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def one_checkpoint(model, optimizer, images, labels):
    loss = F.cross_entropy(checkpoint(model, images, use_reentrant=False), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def left_on(model, *rest):
    checkpoint_layers(model.blocks, 1)
    return exercises.train_small(model, *rest)


def restores_the_mode(model, *rest):
    was = model.training
    model.train()
    loss = exercises.train_small(model, *rest)
    model.train(was)
    return loss


def length_of_a_pair(model, optimizer, images, labels):
    pieces = list(zip(images.split(8), labels.split(8), strict=True))

    def loss_and_count(piece):
        return F.cross_entropy(model(piece[0]), piece[1], reduction="sum"), len(piece)

    loss = accumulate_gradients(pieces, loss_and_count).loss
    optimizer.step()
    optimizer.zero_grad()
    return loss


def by_the_library(model, optimizer, batch):
    def count(micro):
        return int((micro["labels"] >= 0).sum())

    with checkpoint_layers(model.encoder.block, 1), checkpoint_layers(model.decoder.block, 1):
        found = accumulate_gradients(
            list(split(batch, 2)),
            lambda micro: (model(**micro).loss, count(micro)),
            reduction="mean",
            count_items=count,
        )
    optimizer.step()
    optimizer.zero_grad()
    return found.loss


def stacked(phase, parts, rows, card):
    left = dict(parts)
    step = phase == "optimizer_step"
    takes = {
        "micro-batches": ["activations", "temporaries"] * (rows > 1 and not step),
        "checkpointing": ["activations"] * (not step),
        "8-bit states": ["optimizer", *["temporaries"] * step],
        "LoRA": ["gradients"],
        "QLoRA": ["parameters"],
    }
    for name, taken in takes.items():
        left |= dict.fromkeys(taken, 0)
        if sum(left.values()) <= card:
            return name
    return "none"


def counted():
    def script(model, batches):
        was, hits, rows = model.training, 0, 0
        model.eval()
        with torch.inference_mode():
            for x, y in batches:
                hits += (model(x).max(dim=-1).indices == y).sum().item()
                rows += len(y)
        model.train(was)
        return hits / rows

    return 7.0, script


RIGHT = {
    "6.1": [in_steps, "free + idle >= asked → not asked > free + idle"],
    "6.2": [in_whole_bytes, "nbytes * new / rows → nbytes / rows * new"],
    "6.3": [
        checkpointed,
        by_hand,
        restores_the_mode,
        "optimizer.step() → nn.utils.clip_grad_norm_(model.parameters(), 1e9); optimizer.step()",
        "labels), 8) → labels), 7)",
    ],
    "6.4": [
        by_the_library,
        "with checkpoint_layers(model, 1) → if True\nbatch, 4) → batch, 1)",
        "batch, 4) → batch, 3)",
    ],
    "6.5": [
        "recipe, 8 → recipe, __import__('numpy').int64(8)",
        "return recipe, 8 → return [recipe, torch.tensor(8.0)]",
        'adafactor-torch → sgd\n"per-layer" → 2',
        'checkpointing="per-layer" → offload="activations"',
    ],
    "6.6": ['return enough[0] → return f" {enough[0]} ".upper()', "if rows > 1 → if 2 <= rows"],
    "6.7": [
        counted,
        "model(x).argmax(-1) → model(x).softmax(-1).topk(1).indices[:, 0]",
        """model(x).argmax(-1) → model(x).argmax(-1).tolist()
        torch.cat(outputs) → torch.tensor(sum(outputs, []))""",
    ],
}
WRONG = {
    "6.1": [
        "process - allocated - idle → (process - allocated - idle) / 2**30",
        "total - free - process → total - free - allocated - idle",
        "free + idle >= asked → free + idle + asked",
        "free + idle >= asked → total >= asked",
        "free + idle >= asked → asked > free",
    ],
    "6.2": [
        only_the_peak,
        "max(peaks) → max(peaks[:2])",
        "nbytes * new / rows → nbytes * max(1, new // rows)",
        '"other") → "other", "optimizer")',
        "max(peaks) → min(peaks)",
    ],
    "6.3": [
        one_checkpoint,
        left_on,
        length_of_a_pair,
        "mean = 0.0 → mean = 0.0; model.train()",
        "return mean → model.eval(); return mean",
        "optimizer.zero_grad() →",
        "optimizer.step() → torch.optim.AdamW(model.parameters(), lr=1e-3).step()",
        "model(x), y → model(x.bfloat16().float()), y",
        """loss.backward() → loss.backward(retain_graph=True)
        mean += loss.item() → mean = mean + loss""",
    ],
    "6.4": [
        "return total → model.gradient_checkpointing_enable(); return total",
        "with checkpoint_layers(model, 1) → if checkpoint_layers(model, 1)",
        "IGNORED).sum() / targets → IGNORED).sum() ** -1.0 * targets / 16",
    ],
    "6.5": [
        "adafactor-torch → adamw-8bit",
        "recipe, 8 → recipe, 4",
        "recipe, 8 → recipe, True",
        "return recipe, 8 → return recipe",
        'adafactor-torch → sgd\nprecision="bf16" → precision="float32"',
    ],
    "6.6": [
        stacked,
        lambda *given: list(range(100_000)),
        'else "none" → else None',
        "rows > 1 → rows > 2",
        "return enough[0] → return enough[-1]",
        'parts["activations"] + parts["temporaries"] → parts["activations"]',
    ],
    "6.7": [
        """model(x).argmax(-1) → model(x).bfloat16()
        torch.cat(outputs) → torch.cat(outputs).argmax(-1)""",
        """model(x).argmax(-1) → model(x).numpy().copy()
        torch.cat(outputs) → torch.cat([torch.from_numpy(o).argmax(-1) for o in outputs])""",
        """for x, _ in batches: → for x, _ in batches[:20]:
        for _, y in batches → for _, y in batches[:20]""",
        "return (predictions == labels) → return 100 * (predictions == labels)",
        "return 7 → return 99",
    ],
}
