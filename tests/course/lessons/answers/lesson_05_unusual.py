"""Answers to the exercises of lesson 05 that nobody had in mind when its checks were written."""

import math
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gradmem_lib import LoRALinear, checkpoint_layers, count_targets, next_token_loss, split

RIGHT, WRONG = {}, {}
TRAIN, STEPS, EVAL = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
)


def _card(micro, steps=None, evaluation=None, **more):
    def on_one_card(arguments, gpus, fits):
        batch = arguments[TRAIN] * arguments[STEPS] * gpus
        m = micro(batch, fits, arguments, gpus)
        new = {
            TRAIN: m,
            STEPS: steps(batch, m, arguments, gpus) if steps else batch // m,
            EVAL: evaluation(fits, m, arguments) if evaluation else m,
        }
        return {**arguments, **new, **more}

    return on_one_card


def _largest(batch, fits, arguments, gpus):
    return next(m for m in range(fits, 0, -1) if not batch % m)


RIGHT["5.1"] = {
    "numpy": _card(
        lambda b, f, a, g: int(max(torch.arange(1, f + 1)[b % torch.arange(1, f + 1) == 0]))
    ),
}
WRONG["5.1"] = {
    "gcd": (_card(lambda b, f, a, g: math.gcd(b, f)), "largest|divid"),
    "of the GPU's own rows": (
        _card(
            lambda b, f, a, g: next(m for m in range(min(f, a[TRAIN]), 0, -1) if not b % m),
        ),
        "more rows at a time would fit",
    ),
    "evaluation as large as fits": (
        _card(_largest, evaluation=lambda f, m, a: f),
        "evaluation|micro-batch",
    ),
    "GPUs squared": (
        _card(_largest, steps=lambda b, m, a, g: b * g // m),
        "global batch|GPU|rows",
    ),
    "rate too": (_card(_largest, learning_rate=1e-5), "learning_rate"),
    "rate divided": (
        lambda a, g, f: _card(_largest)(a, g, f) | {"learning_rate": a["learning_rate"] / g},
        "learning_rate",
    ),
    "warm-up in micro-batches": (
        lambda a, g, f: _card(_largest)(a, g, f) | {"warmup_steps": a["warmup_steps"] * g},
        "warmup_steps",
    ),
}


def _train_with_arguments(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _one_by_one(model, cache=False):
    """Each layer's forward is wrapped by a checkpoint."""
    model.train()
    model.config.use_cache = cache
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )


RIGHT["5.2"] = {"arguments": _train_with_arguments, "wrapped": _one_by_one}
WRONG["5.2"] = {
    "wrapped, with a cache": (lambda model: _one_by_one(model, cache=True), "key-value cache"),
    "disabled again": (
        lambda model: (
            model.train(),
            model.gradient_checkpointing_enable(),
            model.gradient_checkpointing_disable(),
        ),
        "train mode alone|checkpoint|layers",
    ),
    "cache": (
        lambda model: (model.train(), setattr(model.config, "use_cache", False)),
        "checkpoint|switch",
    ),
    "lora instead": (
        lambda model: (model.train(), model.requires_grad_(False)),
        "another requires_grad",
    ),
}


def _epoch(length, warm, *, order="osz", drop=False):
    from transformers import get_linear_schedule_with_warmup

    def train_epoch(optimizer, micro_batches, window, warmup, accumulate):
        n = len(micro_batches)
        updates = length(n, window)
        schedule = get_linear_schedule_with_warmup(optimizer, warm(warmup, updates, n), updates)
        for start in range(0, n, window):
            held = micro_batches[start : start + window]
            if drop and len(held) < window:
                break
            accumulate(held)
            for step in order:
                {"o": optimizer.step, "s": schedule.step, "z": optimizer.zero_grad}[step]()

    return train_epoch


def _by_hand(optimizer, micro_batches, window, warmup, accumulate):
    rates = [group["lr"] for group in optimizer.param_groups]
    updates = -(-len(micro_batches) // window)
    warm = round(warmup * updates)
    for i in range(updates):
        share = i / warm if i < warm else (updates - i) / max(1, updates - warm)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        accumulate(micro_batches[i * window : (i + 1) * window])
        optimizer.step()
        optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 0.0


def _up(n, w):
    return -(-n // w)


RIGHT["5.3"] = {"by hand": _by_hand}
WRONG["5.3"] = {
    "ends a step early": (
        _epoch(lambda n, w: _up(n, w) - 1, lambda s, u, n: round(s * (u + 1))),
        "ends before the epoch",
    ),
    "no warm-up": (_epoch(_up, lambda s, u, n: 0), "warm-up|warm"),
    "zero between": (_epoch(_up, lambda s, u, n: round(s * u), order="zos"), "zero|gradient"),
    "steps twice": (_epoch(_up, lambda s, u, n: round(s * u), order="ossz"), "steps twice"),
    "dropped, and everything in micro-batches": (
        _epoch(lambda n, w: n, lambda s, u, n: round(s * n), drop=True),
        "warm-up takes 8",
    ),
}


def _log(weight=lambda n, N, k: n / N, log=lambda part, loss, n: part, before=None):
    def train_and_log(model, window):
        counts = [count_targets(m["labels"]) for m in window]
        total, logged = sum(counts), 0.0
        for micro, n in zip(window, counts, strict=True):
            loss = model(**micro).loss
            part = loss * weight(n, total, len(window))
            part.backward()
            logged += log(part.item(), loss.item(), n)
            del loss, part
        return logged

    return train_and_log


RIGHT["5.4"] = {
    "sums of next_token_loss": lambda model, window: _by_sums(model, window),
}


def _by_sums(model, window):
    total = sum(int((m["labels"][:, 1:] != -100).sum()) for m in window)
    logged = torch.zeros(())
    for micro in window:
        loss, _ = next_token_loss(model, micro)
        loss.div(total).backward()
        logged += loss.detach() / total
        del loss
    return logged


WRONG["5.4"] = {
    "log by K": (
        _log(log=lambda part, loss, n: part / 3),
        "entry 'loss'",
    ),
    "log of sums": (_log(log=lambda part, loss, n: loss * n), "the log is the sum"),
    "weights upside down": (_log(lambda n, N, k: N / n / k), "upside|weight"),
    "two mistakes": (
        _log(lambda n, N, k: 1 / k, lambda part, loss, n: loss),
        "mean of means|same weight",
    ),
}


def _mixed(prepare=lambda m: m.float(), dtype=torch.bfloat16, around=True, back=True, zero=True):
    def train_mixed(model, batches, lr):
        prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for batch in batches:
            with torch.autocast("cpu", dtype=dtype, enabled=around):
                loss = model(**batch).loss
                if not back:
                    loss.backward()
            if back:
                loss.backward()
            optimizer.step()
            if zero:
                optimizer.zero_grad()
        return optimizer

    return train_mixed


def _each_weight(model):
    for p in model.parameters():
        p.data = p.data.to(torch.float32)


RIGHT["5.5"] = {"data of each": _mixed(_each_weight)}
WRONG["5.5"] = {
    "double": (_mixed(lambda m: m.double()), "torch.float64"),
    "one layer": (_mixed(lambda m: m.lm_head.float()), "torch.bfloat16 and torch.float32"),
}


def _lora(
    rank_of=lambda r: r,
    before=lambda m: m.requires_grad_(False),
    wrap=LoRALinear,
    match=None,
    decay=0.01,
):
    def add_adapters(model, names, rank, lr):
        before(model)
        for path, layer in [*model.named_modules()]:
            parent, _, own = path.rpartition(".")
            hit = match(path, own, names) if match else own in names
            if hit and isinstance(layer, torch.nn.Linear):
                setattr(model.get_submodule(parent), own, wrap(layer, rank_of(rank)))
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=lr, weight_decay=decay)

    return add_adapters


RIGHT["5.6"] = {
    "named by the end": _lora(match=lambda path, own, names: path.endswith(tuple(names)))
}
WRONG["5.6"] = {
    "twice the rank": (_lora(lambda r: 2 * r), "rank"),
    "first layer alone": (
        _lora(match=lambda path, own, names: own in names and ".0." in path),
        "layers|each|adapters",
    ),
    "embedding trained": (
        _lora(
            before=lambda m: (m.requires_grad_(False), m.get_input_embeddings().requires_grad_())
        ),
        "131,072 numbers too many require a gradient",
    ),
}


@contextmanager
def _quiet(model):
    mode = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for m, on in mode:
            m.training = on


def _held(model, rows):
    with _quiet(model):
        pairs = []
        for row in split(rows, 1):
            logits = model(
                input_ids=row["input_ids"],
                use_cache=False,
                **({"attention_mask": row["attention_mask"]} if "attention_mask" in row else {}),
            ).logits
            loss = F.cross_entropy(
                logits[0, :-1], row["labels"][0, 1:], reduction="sum", ignore_index=-100
            )
            pairs.append((loss.item(), count_targets(row["labels"])))
    return sum(a for a, _ in pairs) / sum(n for _, n in pairs)


def _evaluated(report, ctx=torch.no_grad):
    def held_out_loss(model, rows):
        model.eval()
        losses, counts = [], []
        with ctx():
            for micro in split(rows, 2):
                losses.append(model(**micro, use_cache=False).loss.item())
                counts.append(count_targets(micro["labels"]))
        model.train()
        return report(losses, counts)

    return held_out_loss


RIGHT["5.7"] = {"row by row": _held}
WRONG["5.7"] = {
    "perplexity": (
        _evaluated(lambda L, N: math.exp(sum(a * n for a, n in zip(L, N, strict=True)) / sum(N))),
        "perplexity",
    ),
    "the last": (_evaluated(lambda L, N: L[-1]), "last"),
    "median": (_evaluated(lambda L, N: sorted(L)[len(L) // 2]), "nearly right|got 25"),
    "inference off for good": (
        _evaluated(
            lambda L, N: (
                (torch.set_grad_enabled(False) and 0)
                or sum(a * n for a, n in zip(L, N, strict=True)) / sum(N)
            )
        ),
        "gradients off",
    ),
}


def _resumed_step(model, optimizer, batch, *, layers=None, before=None, zero=True, scale=1.0):
    with ExitStack() as stack:
        stack.enter_context(checkpoint_layers(model.blocks, layers or 1))
        loss = F.cross_entropy(model(batch["x"]), batch["labels"])
        (loss * scale).backward()
    if before:
        before(model)
    optimizer.step()
    if zero:
        optimizer.zero_grad()
    return loss.item()


RIGHT["5.10"] = {"a list of lengths": lambda m, o, b: _resumed_step(m, o, b, layers=[4, 4, 4])}
WRONG["5.10"] = {
    "clipped": (
        lambda m, o, b: _resumed_step(
            m, o, b, before=lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-2)
        ),
        "times as far",
    ),
    "seeded": (
        lambda m, o, b: (torch.manual_seed(0), _resumed_step(m, o, b))[1],
        "a seed of its own",
    ),
    "summed": (lambda m, o, b: _resumed_step(m, o, b, scale=64.0), "times as far"),
}


def _checkpointed_step(*, every=1, seed=None, step=True, returns=True):
    def same_step(model, optimizer, batch):
        if seed is not None:
            torch.manual_seed(seed)
        x = batch["x"]
        for i, block in enumerate(model.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i % every == 0 else block(x)
        loss = F.cross_entropy(model.head(x), batch["labels"])
        loss.backward()
        if step:
            optimizer.step()
        optimizer.zero_grad()
        return loss.item() if returns else None

    return same_step


RIGHT["5.10"] |= {"a loop over blocks": _checkpointed_step()}
WRONG["5.10"] |= {
    "one block in three": (_checkpointed_step(every=3), "a checkpoint on each block"),
    "another seed": (_checkpointed_step(seed=1), "set no seed, and draw nothing before it"),
    "no step, in checkpoints": (_checkpointed_step(step=False), "the weights have not moved"),
    "no loss": (_checkpointed_step(returns=False), "return the loss"),
}


def _adapters_where(called, optimizer=torch.optim.AdamW):
    def add_adapters(model, names, rank, lr):
        model.requires_grad_(False)
        for path, module in list(model.named_modules()):
            parent, _, own = path.rpartition(".")
            if isinstance(module, torch.nn.Linear) and called(path, names):
                setattr(model.get_submodule(parent), own, LoRALinear(module, rank))
        return optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)

    return add_adapters


WRONG["5.6"] |= {
    "a part of the path": (
        _adapters_where(lambda path, names: any(name in path for name in names)),
        "wrap all layers whose last name is in",
    ),
    "Adam": (
        _adapters_where(lambda path, names: path.split(".")[-1] in names, torch.optim.Adam),
        "is no AdamW",
    ),
}
