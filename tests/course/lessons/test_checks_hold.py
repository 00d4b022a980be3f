"""Answers that the checks once judged wrongly, with siblings of each kind: what passes although it
is wrong, what is refused although nothing says that it may not, and what is called by another name.
"""

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gradmem_lib import Recipe, accumulate_gradients, split
from gradmem_lib.course import adam_update
from gradmem_lib.course.catalogue import get
from gradmem_lib.course.judge.verdict import PASSED, judge
from gradmem_lib.course.lessons.lesson_04.exercises_lengths import kept_at_peak
from gradmem_lib.course.lessons.lesson_08.exercises_moving import Disk
from gradmem_lib.course.lessons.lesson_11 import puzzles
from gradmem_lib.techniques.schedules import uniform_segments

ALL = os.environ.get("GRADMEM_ALL")


# What is left behind.


def train_small(model, optimizer, images, labels):
    def loss_and_count(micro):
        return F.cross_entropy(model(micro[0]), micro[1], reduction="sum"), len(micro[1])

    found = accumulate_gradients(list(split((images, labels), 8)), loss_and_count)
    optimizer.step()
    optimizer.zero_grad()
    return found.loss


def in_eval_mode(model, *rest):
    model.eval()
    return train_small(model, *rest)


def one_block_in_eval_mode(model, *rest):
    model.blocks[2].eval()
    return train_small(model, *rest)


def without_autocasts_cache(model, x):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        y = model(x)
    torch.set_autocast_cache_enabled(False)
    return y


def features_in_eval_mode(model, x):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return model.eval()(x)


def sums_of_wider_weights(parameters):
    sums = []
    for p in parameters:
        p.data = p.data.float()
        total = torch.zeros(p.shape)

        def add(p, total=total):
            total.add_(p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(add)
        sums.append(total)
    return sums


def saved_and_backward(model, x):
    out = get("1.2").reference(model, x)
    model(x).float().sum().backward()
    return out


def bytes_from_another_folder(shape, bytes_per_element):
    os.chdir("/")
    return math.prod(shape) * bytes_per_element


# Decided by the last, or by something else than what was asked.


def lost_but_for_nan(gradients, dtype, scale):
    stored, nonzero = (gradients * scale).to(dtype), gradients != 0
    return (((stored == 0) | stored.isinf()) & nonzero).sum().item() / nonzero.sum().item()


def lost_beyond_the_largest(gradients, dtype, scale):
    stored, nonzero = (gradients * scale).to(dtype), gradients != 0
    too_large = stored.abs() > torch.finfo(dtype).max
    return (((stored == 0) | too_large) & nonzero).sum().item() / nonzero.sum().item()


def _scaled_step(optimizer, scale, good, patience, *, whole):
    gradients = []
    for group in optimizer.param_groups:
        in_group = [p.grad for p in group["params"] if p.grad is not None]
        gradients = gradients + in_group if whole == "all" else in_group
        for gradient in in_group:
            gradient /= scale
    if whole == "last":
        gradients = gradients[-1:]
    if not all(gradient.isfinite().all() for gradient in gradients):
        return scale / 2, 0
    optimizer.step()
    return (scale * 2, 0) if good + 1 == patience else (scale, good + 1)


def last_gradient(*arguments):
    return _scaled_step(*arguments, whole="last")


def last_group(*arguments):
    return _scaled_step(*arguments, whole="group")


TAKES = {
    "micro-batches": (("activations", "temporaries"), ()),
    "checkpointing": (("activations",), ()),
    "8-bit states": (("optimizer",), ("optimizer", "temporaries")),
    "LoRA": (("gradients", "optimizer"), ("gradients", "optimizer", "temporaries")),
    "QLoRA": (
        ("parameters", "gradients", "optimizer"),
        ("parameters", "gradients", "optimizer", "temporaries"),
    ),
}


def stacked(phase, parts, rows, card):
    left = dict(parts)
    for name, takes in TAKES.items():
        if name == "micro-batches" and rows == 1:
            continue
        for part in takes[phase == "optimizer_step"]:
            left[part] = 0
        if sum(left.values()) <= card:
            return name
    return "none"


def resident_with_buffers(model):
    found = get("1.1").reference(model)
    return found | {"parameters": found["parameters"] + sum(b.nbytes for b in model.buffers())}


def _saved(key, kept):
    def saved_bytes(model, x):
        own, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def pack(t):
            if t.untyped_storage().data_ptr() not in own:
                seen[key(t)] = t.untyped_storage().nbytes()
            return t if kept else None

        with saved_tensors_hooks(pack, lambda t: t):
            model(x)
        return sum(seen.values())

    return saved_bytes


class CopiesTheWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        ctx.run, ctx.copies = run, [p.clone() for p in run.parameters()]
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        y.backward(gradient)
        return None, x.grad


class OfTorch(torch.autograd.Function):
    apply = staticmethod(lambda run, x: checkpoint(run, x, use_reentrant=False))

    @staticmethod
    def forward(ctx, run, x):
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def divisors_alone(n, a, x):
    divisors = [k for k in range(1, n + 1) if n % k == 0]
    return min(divisors, key=lambda k: kept_at_peak(uniform_segments(n, k), a, x))


def _master_step(weights, masters, lr, *, form):
    with torch.no_grad():
        given = [(w, m) for w, m in zip(weights, masters, strict=True) if w.grad is not None]
        wide = []
        if form in ("all", "popped"):
            wide = [w.grad.float() for w, _ in given]
        for i, (w, m) in enumerate(given):
            if form == "popped":
                m.sub_(wide.pop(0) * lr)
            elif form == "all":
                m.sub_(wide[i], alpha=lr)
            elif form == "named":
                gradient = w.grad.float()
                update = lr * gradient
                m -= update
            elif form == "copied":
                m.copy_(m - lr * w.grad.float())
            w.copy_(m)


def master_step(form):
    return lambda weights, masters, lr: _master_step(weights, masters, lr, form=form)


class CutsOutside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, cap):
        count, total = (labels != -100).sum(), 0
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        for rows, own in zip(h.split(32), labels.split(32), strict=True):
            with torch.enable_grad():
                logits = cap * torch.tanh(rows @ w.T / cap)
                loss = F.cross_entropy(logits, own, reduction="sum") / count
                loss.backward()
                total += loss.detach()
        ctx.save_for_backward(h.grad, w.grad)
        return total

    @staticmethod
    def backward(ctx, d_loss):
        return *(d_loss * gradient for gradient in ctx.saved_tensors), None, None


WRONG = [
    ("0.1", bytes_from_another_folder, "the working directory"),
    ("1.1", resident_with_buffers, "buffers are counted"),
    ("1.2", saved_and_backward, "`model` with gradients in .grad"),
    ("1.2", _saved(lambda t: t.data_ptr(), True), "not tensor.data_ptr()"),
    ("1.2", _saved(lambda t: t.untyped_storage().data_ptr(), False), "let pack return the tensor"),
    ("4.1", CopiesTheWeights, "copies of the weights"),
    ("4.1", OfTorch, "the weights inside run get no gradient"),
    ("4.6", divisors_alone, "only lengths that divide n"),
    ("6.6", stacked, "what the ones before it have left"),
    ("6.6", lambda *arguments: list(range(100_000)), "a sequence of length 100000"),
    ("7.1", lost_but_for_nan, "nan is not finite"),
    ("7.1", lost_beyond_the_largest, "nan is not finite"),
    ("7.2", sums_of_wider_weights, "`parameters` with weights of another dtype"),
    ("7.4", master_step("all"), "float32 copies of"),
    ("7.4", master_step("popped"), "float32 copies of"),
    ("7.5", last_gradient, "only the last gradient decides"),
    ("7.5", last_group, "got"),
    ("7.6", without_autocasts_cache, "autocast's cache off"),
    ("7.6", features_in_eval_mode, "`model` with eval mode on"),
    ("9.7", CutsOutside, "inside torch.enable_grad"),
    ("6.3", in_eval_mode, "`model` with eval mode on"),
    ("6.3", one_block_in_eval_mode, "`model` with eval mode on"),
]
SLOW = {"6.3"}


@pytest.mark.parametrize(("id", "answer", "said"), WRONG)
def test_a_wrong_answer_is_told_what_is_wrong(id, answer, said):
    if id in SLOW and not ALL:
        pytest.skip("trains a model, and compares with every known mistake")
    line = judge(get(id), answer).line
    assert line.startswith(f"✗ {id} not yet: ") and len(line) < 1000
    assert said in line


class NumpyFiles(Disk):
    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        self.number += 1
        np.save(f"{self.folder}/{self.number}", tensor.detach().numpy())
        return self.number

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        return torch.from_numpy(np.load(f"{self.folder}/{packed}.npy"))


def _galore(key):
    @torch.no_grad()
    def galore_step(p, state, rank, every, lr, scale):
        G, wide = p.grad, p.shape[0] <= p.shape[1]
        if state.setdefault(key, 0) % every == 0:
            U, _, Vh = torch.linalg.svd(G, full_matrices=False)
            state["P"] = (U[:, :rank] if wide else Vh[:rank].T).clone()
        state[key] += 1
        P = state["P"]
        update = adam_update(P.T @ G if wide else G @ P, state)
        p.sub_(lr * scale * (P @ update if wide else update @ P.T))

    return galore_step


def layers_by_numpy(peak, layers, budget):
    low, high = np.int64(0), np.int64(layers)
    while low < high:
        middle = (low + high) // 2
        if peak(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return low


def adapters_without_decay(model, names, rank, lr):
    optimizer = get("5.6").reference(model, names, rank, lr)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)


RECIPE_7B = Recipe(
    precision="bf16",
    optimizer="adafactor-torch",
    in_backward=True,
    checkpointing="per-layer",
    chunked_loss=True,
)


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("5.6", adapters_without_decay),
        ("6.5", lambda: (RECIPE_7B, np.int64(8))),
        ("6.5", lambda: (RECIPE_7B, torch.tensor(8))),
        ("6.5", lambda: [RECIPE_7B, 8.0]),
        ("7.4", master_step("named")),
        ("7.4", master_step("copied")),
        ("8.3", NumpyFiles),
        ("8.5", layers_by_numpy),
        ("9.9", _galore("t")),
        ("9.9", _galore("m")),
        ("9.9", _galore("calls")),
    ],
)
def test_what_no_statement_forbids_passes(id, answer):
    verdict = judge(get(id), answer)
    assert verdict.outcome == PASSED, verdict.line


def _new_lists(weights, masters, lr):
    masters = [
        m if w.grad is None else m - lr * w.grad.float()
        for w, m in zip(weights, masters, strict=True)
    ]
    weights[:] = [*weights] if masters else []


def _turned_round(asked, total, free, process, allocated, idle):
    return {
        "context": process - allocated - idle,
        "others": total - free - process,
        "in_pieces": free + idle < asked,
    }


def _stack_of_one(mlp, x, tiles):
    return torch.stack([checkpoint(mlp, x, use_reentrant=False)])


@torch.no_grad()
def _tiles_without_a_graph(mlp, x, tiles):
    parts = [checkpoint(mlp, part, use_reentrant=False) for part in x.tensor_split(tiles, dim=1)]
    return torch.cat(parts, dim=1)


def _clipped_by_the_inverse(model, loss_of, lr, max_norm):
    squares = []

    def both(hook):
        trained = [p for p in model.parameters() if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(hook) for p in trained]
        loss_of(model).backward()
        for handle in handles:
            handle.remove()

    def look(p):
        squares.append(p.grad.square().sum().item())
        p.grad = None

    both(look)
    norm = math.sqrt(sum(squares))

    @torch.no_grad()
    def move(p):
        p.sub_(lr * min(1.0, norm / max_norm) * p.grad)
        p.grad = None

    both(move)
    return norm


@pytest.mark.parametrize(
    ("id", "answer", "said"),
    [
        ("6.1", _turned_round, "turned round"),
        ("7.4", _new_lists, "no weight and no master has changed"),
        ("8.6", _stack_of_one, "4 dimensions"),
        ("8.6", _tiles_without_a_graph, "no_grad"),
        ("9.4", _clipped_by_the_inverse, "max_norm / norm"),
    ],
)
def test_a_mistake_is_called_by_its_own_name(id, answer, said):
    assert said in judge(get(id), answer).line


def test_a_sharded_model_is_returned():
    if not ALL:
        pytest.skip("shards a model on two ranks, and once more for every known mistake")
    wrap = get("10.4").reference

    def returns_nothing(model, mesh):
        wrap(model, mesh)

    assert "is a `return` missing" in judge(get("10.4"), returns_nothing).line


def test_a_language_models_head_says_nothing_of_its_loss():
    if not ALL:
        pytest.skip("trains by transformers")

    def by_the_head(model, batch):
        if not hasattr(model, "lm_head"):
            model.accepts_loss_kwargs = False
        return model

    assert "head may ignore the number too" in judge(get("3.8"), by_the_head).line


def test_a_recipe_with_room_is_weighed_without_the_allocators_replay(monkeypatch):
    def never():
        raise AssertionError("replayed")

    here = puzzles.search(puzzles.puzzle("11.4"))
    recipe = Recipe(precision="bf16", lora_rank=16, accumulation=8)
    monkeypatch.setattr(here, "option", lambda recipe: "replayed")

    def weighed(share: float):
        """What is found where the live tensors take this share of the card."""
        live = SimpleNamespace(total=round(share * here.card.nbytes))
        found = SimpleNamespace(
            target="cuda", peak=live, offload_traffic_bytes=0, replay_allocator=never
        )
        monkeypatch.setattr(puzzles, "predict", lambda *args, **kwargs: found)
        return here.quick_option(recipe)

    assert weighed(0.5).fits and weighed(0.3).needs < weighed(0.4).needs
    assert weighed(0.7) == weighed(1.2) == "replayed"
