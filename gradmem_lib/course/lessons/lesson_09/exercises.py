"""Lesson 09's exercises, in the order of the lesson."""

import copy
import math
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ....measure.storages import tensors_in
from ....measure.tracker import MemoryTracker
from ....model.configs import find_model
from ....techniques.optimizers import code_table
from ....training.recipe import Recipe
from ....units import MiB, format_bytes
from ...judge.compare import Measured, plain_int
from ...judge.exercise import Exercise, Unusable, calls, measured
from ..shared.every_linear import without_needless_targets
from ..shared.seen import drawn, gradient_of, largest_first
from ..shared.settings import flat, quietly, trained_of, weights_of

# 9.1


def quantize(x, code, block):
    """``x`` (n,) in blocks: indices (n,) uint8 of the nearest values of ``code``, each block's
    largest magnitude, and what is read back.
    """
    rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
    absmax = rows.abs().amax(dim=1)
    scaled = rows / absmax.clamp(min=1e-30)[:, None]
    indices = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2)
    back = (code[indices] * absmax[:, None]).flatten()[: len(x)]
    return indices.flatten()[: len(x)].to(torch.uint8), absmax, back


def quantize_cases(answer):
    few = torch.tensor([0.3, -2.3, 0.6, 0, 0, 0, -1.1, 0.4])
    values = torch.tensor([-1.0, -0.5, 0.0, 0.25, 1.0])
    words = "x = [0.3, -2.3, 0.6, 0, 0, 0, -1.1, 0.4], code = [-1, -0.5, 0, 0.25, 1], block = 3"
    many = (drawn(9, 1000) * torch.logspace(-3, 1, 1000)).square() * 1e-10
    for name, x, code, block in (
        (words, few, values, 3),
        ("1,000 numbers below 1e-7 in blocks of 72", many, code_table(False, None), 72),
    ):
        indices, absmax, back = map(torch.as_tensor, answer(x, code, block))
        yield f"{name}: absmax, one a block", absmax.flatten()
        yield f"{name}: indices", indices.flatten()
        yield f"{name}: bytes of an index", indices.element_size()
        yield f"{name}: the numbers read back", back


QUANTIZE = Exercise(
    "9.1",
    quantize,
    quantize_cases,
    """
    view(-1, block) → view(1, -1)
        only one magnitude is kept for all blocks: each block of `block` numbers has its own, so a
        large number makes only its own block less exact.
    rows.abs().amax(dim=1) → rows.amax(dim=1)
        the largest number is not the largest magnitude if numbers are negative: take abs() first.
    rows.abs().amax(dim=1) → rows.abs().amax(dim=1).half().float()
        absmax is rounded to 16 bits, so every number that is read back has the wrong size: keep
        absmax in float32, as x is.
    torch.bucketize(scaled, (code[1:] + code[:-1]) / 2) → torch.bucketize(scaled, code[:-1])
        this takes the next value above, not the nearest: the border between two values is their
        middle.
    rows / absmax.clamp(min=1e-30)[:, None] → rows
        x is not divided by absmax: an index is that of the value nearest to number / absmax.
    code[indices] * absmax[:, None] → code[indices]
        back is still in units of absmax: multiply the code's values by it.
    rows = F.pad → code = torch.linspace(-1, 1, len(code)); rows = F.pad
        the code's own values have no effect: find the nearest value of `code`, whose values are
        not evenly spaced.
    .to(torch.uint8) →
        an index has 8 bytes here, twice a float32 number: .to(torch.uint8).
    """,
)

# 9.3


class Lion(torch.optim.Optimizer):
    """A step of ``lr`` along the sign of a blend of momentum and gradient (Chen et al. 2023,
    algorithm 2): one state.
    """

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * m.lerp(p.grad, 1 - beta1).sign())
                    m.lerp_(p.grad, 1 - beta2)


def momentum_of(optimizer, p) -> list[torch.Tensor]:
    values = optimizer.state.get(p, {}).values()
    return [t for t in values if isinstance(t, torch.Tensor) and t.numel() > 1]


def lion_cases(answer):
    first, paused = (nn.Parameter(torch.ones(4)) for _ in range(2))
    # The signs of many numbers tell one blend from another.
    many, narrow = nn.Parameter(drawn(0, 1000)), nn.Parameter(torch.ones(64).bfloat16())
    groups = [
        {"params": [first]},
        {"params": [paused, many, narrow], "lr": 0.03, "weight_decay": 0.5},
    ]
    optimizer = answer(groups, lr=0.1, betas=(0.8, 0.95))
    given = []
    for gradient in ([0, 2.0, -1.0, 2.0], [0, -0.1, -1.0, -1.0], [0.0] * 4, [1.0, 0, 0, 3.0]):
        given.append(gradient)
        first.grad, paused.grad = torch.tensor([gradient, gradient])
        many.grad = drawn(len(given), 1000)
        narrow.grad = torch.ones_like(narrow)
        if len(given) == 2:
            paused.grad = None
        optimizer.step()
        name = f"weights of 1 with lr=0.1 and betas=(0.8, 0.95), after gradients of {given}"
        yield f"{name}: p.grad, which step() may only read", gradient_of(first)
        yield name, first.detach().clone()
        yield f"{name}: the momentum in self.state[p]", flat(momentum_of(optimizer, first))
        name = f"a second group with lr=0.03 and weight_decay=0.5, after step {len(given)}"
        words = "the same weights and gradients, but none in step 2, and their momentum"
        yield f"{name}: {words}", flat([paused, *momentum_of(optimizer, paused)])
        yield f"{name}: another parameter of this group", many.detach().clone()
    nbytes = [t.element_size() for t in momentum_of(optimizer, narrow)]
    yield "bytes of a number in the state of a bf16 parameter", nbytes
    resumed = answer(groups, lr=0.1, betas=(0.8, 0.95))
    resumed.step()  # it has a momentum of its own before it loads another
    resumed.load_state_dict(optimizer.state_dict())
    first.grad = torch.full((4,), 0.1)
    resumed.step()
    yield "a step after load_state_dict, by the momentum in self.state", first.detach().clone()
    p = nn.Parameter(torch.ones(64, 64))
    optimizer = answer([p], lr=0.1)
    with MemoryTracker(live=False) as tracker:
        p.grad = torch.ones_like(p)
        optimizer.step()
        beside = tracker.current.total // p.nbytes - 2 - len(momentum_of(optimizer, p))
    yield "tensors as large as a parameter that stay alive outside of self.state", beside


LION = Exercise(
    "9.3",
    Lion,
    lion_cases,
    """
    1 - beta1).sign() → 1 - beta2).sign()
    lerp_(p.grad, 1 - beta2 → lerp_(p.grad, 1 - beta1
        the betas are swapped: use beta1 for the step's blend, beta2 for the momentum that is kept.
    m.lerp(p.grad → m.lerp_(p.grad
        the momentum is blended twice: the step's blend by beta1 is a new tensor, m.lerp(…).
    m.lerp_(p.grad, 1 - beta2) →
    m.lerp(p.grad, 1 - beta1) → m.lerp_(p.grad, 1 - beta2)
        the step takes the sign of the new momentum, a blend by beta2: it takes that of a blend by
        beta1, of the old momentum.
    1 - beta1).sign() → 1 - beta1)
        the blend itself is subtracted: Lion takes its sign, so that every weight moves by lr.
    m.lerp(p.grad, 1 - beta1).sign() → p.grad.sign()
        only the gradient decides the sign: momentum has no effect.
    self.state[p].setdefault( → vars(self).setdefault("m", {}).setdefault(p, {}).setdefault(
        the momentum is kept outside of self.state, where state_dict() does not save it: keep it in
        self.state[p].
    p.sub_(group["lr"] → p.sub_(self.defaults["lr"]
        every group steps by the same rate: read lr from its group.
    m.lerp_(p.grad, 1 - beta2) →
    p.mul_(1 - group["lr"] → m.lerp_(p.grad, 1 - beta2); p.mul_(1 - group["lr"]
        m takes the new gradient before the sign is taken: blend the old m for the step, and update
        m afterwards.
    """,
    tolerance=1e-4,
    pairs=True,
)

# 9.5


class LoRA(nn.Module):
    """``base(x) + alpha / rank * B(A(x))``; ``base``, an ``nn.Linear``, is frozen, and B starts at
    zero.
    """

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        start = torch.randn(rank, base.in_features).to(base.weight)  # its dtype and device
        self.A = nn.Parameter(start / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank).to(base.weight))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.A), self.B)


ADAPTER_CARD = 1_400_000  # bytes: a matrix of 1,048,576 and what rank 8 needs beside it


def lora_cases(answer):
    base, x = nn.Linear(12, 20), drawn(2, 2, 5, 12).requires_grad_()
    layer = answer(base, 4, 6)
    yield "tensors of the base that are trained", sum(p.requires_grad for p in base.parameters())
    trained = trained_of(layer)
    name = "12 to 20, rank 4, alpha 6"
    yield f"{name}: trained shapes (a bias has one side)", sorted(sorted(p.shape) for p in trained)
    out = layer(x)
    yield f"{name}: the output before the first update, which is base(x)", out.detach()
    # Their names are free, and they may lie the other way round.
    A, B = sorted(trained, key=lambda p: 20 in p.shape)
    yield f"{name}: whether B starts at zero", not B.any()
    yield f"{name}: whether A starts random", len(A.unique()) > 1
    for p in (A, B):
        known = drawn(4, 4, max(p.shape))
        p.data.copy_(known if p.shape == known.shape else known.T)
    out = layer(x)
    yield f"{name}: what A and B add to base(x)", (out - base(x)).detach()
    out.square().sum().backward()
    yield f"{name}: the gradient of x, through the base, A and B", gradient_of(x)
    base, x = nn.Linear(512, 512, bias=False), drawn(2, 10, 512).requires_grad_()
    layer = answer(base, 8, 16)
    unit, size = "matrices as large as the base", base.weight.nbytes
    run = measured(lambda: layer(x).sum().backward(), ADAPTER_CARD, unit, size, model=layer)
    yield "a base of 512 × 512 and rank 8", run


LORA = Exercise(
    "9.5",
    LoRA,
    lora_cases,
    """
    base.requires_grad_(False) → base
        the base is trained as well: base.requires_grad_(False).
    nn.Parameter(start → (start
    nn.Parameter(torch.zeros( → (torch.zeros(
        there is nothing to train: a tensor becomes a parameter of its module by nn.Parameter.
    torch.randn( → 0 * torch.randn(
        A does not start random: if it starts at zero, as B does, neither ever gets a gradient, and
        if its rows start alike, they stay alike.
    , alpha / rank → , alpha
        what A and B add is multiplied by alpha: multiply by alpha / rank, so that another rank
        does not change the learning rate.
    torch.randn(rank, → torch.zeros(rank,
    torch.zeros(base.out_features → torch.randn(base.out_features
        A and B are exchanged: A starts random, and B at zero.
    self.base(x) + →
        the base has no effect on the output: add A and B's part to base(x).
    F.linear(F.linear(x, self.A), self.B) → (self.B @ (self.A @ x))
        the formula has x as one column, but here each matrix acts on the last dimension of x:
        x @ A.T @ B.T, or F.linear(F.linear(x, A), B), which transposes by itself.
    F.linear(F.linear(x, self.A), self.B) → F.linear(x, self.B @ self.A)
        B @ A makes a matrix as large as the base, and its gradient is as large: multiply x by A
        first, then by B.
    """,
    tolerance=1e-4,
)

# 9.8

CARD_300 = 300 * MiB
LEAST = {"every weight": 12, "adapters": 40}  # layers


@lru_cache(maxsize=32)
def smollm2_peak(layers: int, recipe: Recipe):
    """The peak (a ``MemorySnapshot``) that is predicted for SmolLM2 with so many layers, on 8 rows
    of 128 tokens.
    """
    from ....prediction.predict import predict

    config = copy.deepcopy(find_model("SmolLM2-135M")[0])
    config.num_hidden_layers = layers
    return predict(config, batch_size=8, seq_len=128, recipe=recipe, target="cpu").peak


def under_300() -> tuple[tuple[int, Recipe], tuple[int, Recipe]]:
    """(layers, recipe) that trains every weight under 300 MiB, and (layers, recipe) that trains
    adapters.
    """
    small = {"precision": "bf16", "checkpointing": "per-layer", "chunked_loss": True}
    every_weight = Recipe(optimizer="adafactor-torch", in_backward=True, **small)
    adapters = Recipe(optimizer="adamw-8bit", lora_rank=16, quantized_base=True, **small)
    return (12, every_weight), (40, adapters)


def beside_the_card(layers: int, recipe: Recipe) -> Measured:
    # The lesson's build asks for the peaks of these two: a first check predicts two, not four.
    if (layers, recipe) in under_300():
        return Measured(None, CARD_300, CARD_300, "")
    peak = smollm2_peak(layers, recipe)
    says = (
        f"{layers} layers peak at {format_bytes(peak.total)}, in {peak.phase}, and the card has "
        f"300 MiB. The parts of this peak: {largest_first(peak.by_category)}."
    )
    return Measured(None, peak.total, CARD_300, says)


@quietly
def under_300_cases(answer):
    pairs = answer()
    match pairs:
        case [_, Recipe()], [_, Recipe()]:
            pass
        case _:
            raise Unusable("return two pairs, (layers, Recipe) and (layers, Recipe)")
    for (name, least), (layers, recipe) in zip(LEAST.items(), pairs, strict=True):
        layers = plain_int(layers)
        recipe = without_needless_targets(recipe, find_model("SmolLM2-135M")[0])
        yield f"{name}: lora_rank, the rank of adapters", recipe.lora_rank or "no adapters"
        yield f"{name}: lora_targets, which leave no linear layer out", recipe.lora_targets
        yield f"{name}: whether there are at least {least} layers", layers >= least
        yield f"{name}: the predicted peak", beside_the_card(layers, recipe)


UNDER_300 = Exercise("9.8", under_300, under_300_cases)

# 9.4

CLIP_CARD = 3_200_000  # bytes: eight matrices of 262,144, and a few at a time beside them
WIDTH = 256


def clip_in_backward(model, loss_of, lr, max_norm) -> float:
    """One step of gradient descent by the gradient, clipped to ``max_norm``, that never exists as a
    whole; its norm.
    """
    squares, factor = [], 0.0  # in the first pass nothing moves

    @torch.no_grad()
    def hook(p):
        squares.append(p.grad.square().sum().item())
        p.add_(p.grad, alpha=-lr * factor)
        p.grad = None

    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(hook) for p in trained]
    loss_of(model).backward()
    norm = math.sqrt(sum(squares))
    factor = min(1.0, max_norm / (norm + 1e-6))
    loss_of(model).backward()
    for handle in handles:
        handle.remove()
    return norm


def clip_setting():
    """Eight linear layers of which the last is the first once more and the third is frozen, and
    rows (16, 256). The second has nearly all of the norm: errors of a sum in 16 bits do not cancel.
    """
    layers = [nn.Linear(WIDTH, WIDTH, bias=i == 5) for i in range(8)]
    for i, layer in enumerate(layers):
        layer.weight.data.copy_(drawn(120 + i, WIDTH, WIDTH) / 12)
    layers[5].bias.data.zero_()
    layers[1].weight.data.div_(30)
    layers[2].requires_grad_(False)
    return nn.Sequential(*layers, layers[0]), drawn(12, 16, WIDTH)


def clip_cases(answer):
    for name, lr, share in (
        ("a norm of twice max_norm, of which one layer has nearly all", 0.02, 0.5),
        ("a norm of a tenth of max_norm", 0.003, 10.0),
    ):
        model, x = clip_setting()

        def loss_of(model, x=x):
            return model(x).square().mean()

        trained = trained_of(model)
        gradients = torch.autograd.grad(loss_of(model), trained)
        before, starts = weights_of(model), copy.deepcopy(trained)
        max_norm = share * flat(gradients).norm().item()
        step = partial(answer, model, loss_of, lr, max_norm)
        run = measured(step, CLIP_CARD, model=model)
        yield f"{name}: the norm of the whole gradient, which is returned", run.value
        moves = []
        for p, start, gradient in zip(trained, starts, gradients, strict=True):
            moves.append((p - start).norm() / gradient.norm())
        words = "by how many times lr * gradient each trained parameter moves"
        yield f"{name}: {words}", (torch.stack(moves) / lr).detach()
        way = (weights_of(model) - before) / lr
        yield f"{name}: how far each weight moves, in learning rates", way
        yield f"{name}: gradients that are left in .grad", sum(p.grad is not None for p in trained)
    yield "what is alive at once, where no gradient waits", run


CLIP = Exercise(
    "9.4",
    clip_in_backward,
    clip_cases,
    """
    -lr * factor → -lr * bool(factor) * min(1.0, max_norm / squares[-1] ** 0.5)
        each gradient is clipped by its own norm: all gradients must shrink by the same factor,
        that of the whole norm.
    -lr * factor → -lr * (factor == 0) * min(1.0, max_norm / sum(squares) ** 0.5)
        each gradient is clipped by the norm of the gradients so far: the whole norm is known when
        backward has ended, so it needs a separate first pass.
    handle.remove() → handle
        the hooks are still on the parameters, so every later backward steps too: remove each
        handle.
    p.grad = None → p.grad = None if factor else p.grad
        the first pass leaves its gradients in p.grad, where they wait, and the second adds to
        them: set p.grad = None in both hooks.
    min(1.0, max_norm / (norm + 1e-6)) → max_norm / (norm + 1e-6)
        a gradient whose norm is below max_norm is made larger: the factor is at most 1.
    return norm → return math.sqrt(sum(squares))
        the norm that is returned is that of both passes together: take the root after the first.
    min(1.0, max_norm / (norm + 1e-6)) → 1.0
        the step uses the unclipped gradient where its norm is above max_norm.
    math.sqrt(sum(squares)) → sum(squares)
        this is the sum of the squares, and not the norm: the root is missing.
    """,
    tolerance=1e-4,
)

# 9.7

LOSS_CARD = 8_000_000  # bytes


def summed_loss(rows, weight, labels, cap):
    logits = cap * torch.tanh(rows @ weight.T / cap)
    return F.cross_entropy(logits, labels, reduction="sum")


class ChunkedLoss(torch.autograd.Function):
    """``apply(hidden, weight, labels, cap)``: the mean cross-entropy of ``cap * tanh(hidden @
    weight.T / cap)``, in chunks.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, cap):
        total, count = 0.0, (labels != -100).sum()
        hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
        for i in range(0, len(hidden), 64):
            with torch.enable_grad():
                loss = summed_loss(hidden[i : i + 64], weight, labels[i : i + 64], cap)
                (loss / count).backward()
            total += loss.detach() / count
        ctx.save_for_backward(hidden.grad, weight.grad)
        return total

    @staticmethod
    def backward(ctx, d_loss):
        return *(gradient * d_loss for gradient in ctx.saved_tensors), None, None


def loss_batch(seed: int):
    """Hidden states (157, 6), output matrix (20, 6) and labels, of which some are -100."""
    hidden, weight = drawn(seed, 157, 6).double(), drawn(seed + 1, 20, 6).double()
    hidden[:50] *= 2  # the first third has a larger loss
    labels = torch.arange(157) * 7 % 20
    labels[seed::7] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def loss_cases(answer):
    batch = loss_batch(3)
    before = [t.detach().clone() for t in batch]
    loss = answer.apply(*batch, 2.0)
    yield "157 tokens with cap 2: the loss", loss.detach()
    answer.apply(*loss_batch(4), 2.0)
    with FlopCounterMode(display=False) as counter:
        (3 * loss).backward()
    name = "three times the loss of 157 tokens with cap 2, after another loss's forward"
    yield f"{name}: the gradient of hidden", gradient_of(batch[0])
    yield f"{name}: the gradient of weight", gradient_of(batch[1])
    words = "operations of matrix products in backward, since forward makes both gradients"
    yield f"{name}: {words}", counter.get_total_flops()
    same = all(map(torch.equal, before, batch))
    yield f"{name}: whether hidden, weight and labels are as before", same
    hidden, weight = drawn(5, 1000, 32).requires_grad_(), drawn(6, 3000, 32).requires_grad_()
    labels = torch.arange(1000)
    run = measured(lambda: answer.apply(hidden, weight, labels, 5.0).backward(), LOSS_CARD)
    yield "the bytes of 1,000 tokens of 32 numbers and a vocabulary of 3,000", run


LOSS = Exercise(
    "9.7",
    ChunkedLoss,
    loss_cases,
    """
    labels[i : i + 64], cap) → labels[i : i + 64], 1e9)
        the cap has no effect: the logits are cap * tanh(hidden @ weight.T / cap).
    gradient * d_loss for → gradient for
        backward leaves out the gradient that it is given: multiply by it, or scaling the loss
        afterwards has no effect on the gradients.
    (labels != -100).sum() → len(labels)
        this divides by all rows: labels of -100 are ignored, so do not count them.
    (labels != -100).sum() → 1
        this is the sum over the tokens: divide it, and the gradients, by the number of labels that
        are not -100.
    total, count = 0.0 → K, total, count = len(labels[::64]), 0.0
    loss = summed_loss( → loss = count / labels[i : i + 64].ne(-100).sum() / K * summed_loss(
        every chunk has the same weight (a mean of means): divide each sum by the number of labels
        in all chunks, not in its own.
    range(0, len(hidden), 64) → range(0, len(hidden) - 63, 64)
        the last rows are left out: the last chunk may be shorter than the others.
    i in range(0, len(hidden), 64) → i, rows in zip(range(0, 9999, 64), hidden.split(64))
    summed_loss(hidden[i : i + 64] → summed_loss(rows
        a gradient that forward took by autograd is None: each chunk needs a backward(), and must be
        cut and multiplied inside torch.enable_grad(), since a piece cut outside has no graph.
    (loss / count).backward() → (loss / labels[i : i + 64].ne(-100).sum()).backward()
        each chunk's gradients are divided by its own number of labels: divide by that of all
        chunks, as the loss is.
    """,
    tolerance=1e-4,
)

# 9.9


def adam_update(
    g: torch.Tensor, state: dict, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
) -> torch.Tensor:
    """Adam's update (without lr) for a gradient ``g`` of any shape. The moments and their count
    live in ``state["adam_update"]``, so that all other names in ``state`` are free.
    """
    own = state.setdefault("adam_update", {})
    own["t"] = t = own.get("t", 0) + 1
    m = own.setdefault("m", torch.zeros_like(g)).lerp_(g, 1 - beta1)
    v = own.setdefault("v", torch.zeros_like(g)).lerp_(g * g, 1 - beta2)
    return m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)


@torch.no_grad()
def galore_step(p, state, rank, every, lr, scale) -> None:
    """Adam on ``p``'s gradient, projected to ``rank`` directions of its shorter side (Zhao et al.
    2024, algorithm 2).
    """
    G, wide = p.grad, p.shape[0] <= p.shape[1]
    call = state["call"] = state.get("call", -1) + 1
    if call % every == 0:
        U, _, Vh = torch.linalg.svd(G, full_matrices=False)
        state["P"] = (U[:, :rank] if wide else Vh[:rank].T).clone()
    P = state["P"]
    small = P.T @ G if wide else G @ P
    update = adam_update(small, state)
    p -= lr * scale * (P @ update if wide else update @ P.T)


MATRICES = (  # name, seeds of the gradients, shape, settings (rank, every, lr, scale)
    (
        "6 × 9, rank 2, a new P every 2 calls, the same G in each call",
        (1, 1, 1, 1),
        (6, 9),
        (2, 2, 0.1, 0.5),
    ),
    ("15 × 5, rank 3, a new P every 3 calls", (1, 2, 3, 4), (15, 5), (3, 3, 0.02, 0.5)),
)


def galore_run(answer, name, seeds, shape, settings):
    """The cases after each step."""
    start, mean, state = drawn(0, *shape).double(), 0.0, {}
    p = nn.Parameter(start.clone())
    _, every, lr, scale = settings
    for number, seed in enumerate(seeds, 1):
        gradient = drawn(seed, *shape).double()
        if number == seed == every:
            # A decomposition may give a direction either sign. The first moment becomes 0 here, so
            # that it fits both signs of the new directions.
            gradient = -9 * mean
        mean = 0.9 * mean + 0.1 * gradient
        p.grad = gradient
        answer(p, state, *settings)
        kept = 0
        for t in tensors_in([state]):
            if t.numel() > 1:
                kept += t.untyped_storage().nbytes() // t.element_size()
        after = f"{name}, after call {number}"
        yield f"{after}: p.grad, which is only read", gradient_of(p)
        moved = (p.detach() - start) / lr / scale
        yield f"{after}: how far p is from its start, in lr * scale", moved
        yield f"{after}: numbers in the tensors of `state`, and behind views", kept


def galore_cases(answer):
    for matrix in MATRICES:
        yield from galore_run(answer, *matrix)


GALORE = Exercise(
    "9.9",
    galore_step,
    galore_cases,
    """
    p.shape[0] <= p.shape[1] → p.shape[0] > p.shape[1]
        P is on the wrong side of the gradient: P has a row for each number of the shorter side,
        as (rows, rank) for a wide matrix.
    p.shape[0] <= p.shape[1] → True
        a tall matrix is projected from the left too, along its longer side: for a tall matrix P
        comes from Vh, and the small gradient is G @ P.
    if call % every == 0 → if True
        P is renewed in each step: each time this costs an SVD, and the moments belong to the old
        directions; renew it in every `every`-th call.
    if call % every == 0 → if call == 0
        P is never renewed: the gradient's directions change, so take new ones in every `every`-th
        call.
    .clone() →
        P is a view, and a view keeps all of the storage that it was cut from: .clone() it.
    state["P"] = ( → state.pop("adam_update", None); state["P"] = (
        the moments begin again with each new P: replace only P, and keep the moments.
    lr * scale → lr
        the scale is missing: subtract lr * scale times the update.
    adam_update(small, state) → (lambda u: P.T @ u if wide else u @ P)(adam_update(G, state))
        the moments are as large as the whole matrix: pass the small gradient to adam_update, and
        map its update back.
    """,
    changes="p state",
)

# 9.2


def adafactor_second_moment(grad, row, column, beta2, eps) -> torch.Tensor:
    """Average the row sums (rows,) and column sums (columns,) of ``grad**2 + eps`` in place; the v
    (rows, columns) that they make.
    """
    squares = grad.square() + eps
    row.lerp_(squares.sum(1), 1 - beta2)
    column.lerp_(squares.sum(0), 1 - beta2)
    return torch.outer(row, column) / row.sum()


def factored_cases(answer):
    grad = torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, 3.0]], dtype=torch.float64)
    row, column = (torch.zeros(n, dtype=torch.float64) for n in grad.shape)
    name = "grad = [[1, 2, 0], [0, -1, 3]], beta2 = 0.75, eps = 0.5"
    for words in (name, f"{name}, and then 2 * grad"):
        v = answer(grad, row, column, 0.75, 0.5)
        yield f"{words}: row, which changes in place", row.clone()
        yield f"{words}: column, which changes in place", column.clone()
        yield f"{words}: v", v
        grad = 2 * grad


FACTORED = Exercise(
    "9.2",
    adafactor_second_moment,
    factored_cases,
    """
    / row.sum() →
        the product of a row sum and a column sum includes the matrix's whole sum once too often:
        divide by the total, row.sum().
    grad.square() → grad.abs()
        these are sums of the gradient's magnitude, not of its square.
    row.lerp_(squares.sum(1), 1 - beta2) → row.mul_(beta2).add_(squares.sum(1))
    column.lerp_(squares.sum(0), 1 - beta2) → column.mul_(beta2).add_(squares.sum(0))
        the new sums are added whole: an average takes 1 - beta2 of them.
    squares.sum(1), 1 - beta2 → squares.sum(1), beta2
    squares.sum(0), 1 - beta2 → squares.sum(0), beta2
        beta2 and 1 - beta2 are swapped: the new sums get the weight 1 - beta2.
    grad.square() + eps → grad.square()
        eps has no effect: add it to every square, before the sums.
    grad.square() + eps → grad.square()
    / row.sum() → / row.sum() + eps
        eps is added to v at the end: add it to every square, before the sums.
    squares.sum(1) → squares.mean(1)
    squares.sum(0) → squares.mean(0)
        row and column hold means: use sums, torch.sum along one dimension.
    torch.outer(row, column) / row.sum() → squares.sum(1)[:, None] * squares.sum(0) / squares.sum()
        v is made of this step's sums alone: make it of the averages, `row` and `column`.
    """,
    changes="row column",
)

# 9.6


def nf4_bytes(numbers, block, group) -> int:
    """The bytes of a matrix of ``numbers`` in NF4 with double quantization: 4 bits each; a byte for
    each ``block`` of them; a float32 for each ``group`` of these bytes; and one for their mean.
    """
    blocks = -(-numbers // block)
    return -(-numbers // 2) + blocks + 4 * -(-blocks // group) + 4


NF4 = Exercise(
    "9.6",
    nf4_bytes,
    calls(
        (64, 64, 256),
        (77, 16, 3),
        (4096 * 11008, 64, 256),
        hidden=[(455, 10, 4)],
    ),
    """
    + blocks + 4 * -(-blocks // group) + 4 → + 4 * blocks
        a block's absmax has 4 bytes here: double quantization makes it one byte, and keeps one
        float32 for each group of them.
    + blocks + → + 4 * blocks +
        each block's absmax has 4 bytes here: double quantization makes it one byte.
    // group) + 4 → // group)
        the mean of all absmax values, one float32 of 4 bytes, is missing.
    -(-numbers // block) → numbers // block
    -(-numbers // 2) → numbers // 2
    -(-blocks // group) → (blocks // group)
        a last pair, block or group that is not full counts too: round up.
    -(-numbers // block) → numbers // block + 1
    -(-blocks // group) → (blocks // group + 1)
        one too many is counted where the last block or group is full: -(-a // b) rounds up.
    -(-numbers // 2) → numbers
        a number takes one byte here: two numbers of 4 bits share one byte.
    -(-blocks // group) → -(-numbers // group)
        a group is made of absmax values, not of weights: there is one float32 for each `group`
        blocks.
    4 * -(-blocks → 2 * -(-blocks
        a group's scale has 2 bytes here: it is a float32, of 4.
    """,
)
