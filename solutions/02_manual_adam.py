# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Adam by hand
#
# *60 minutes: sections 1 to 9, with exercises 2.1 to 2.4. 35 more are optional. You need: lesson 01.*
#
# <!-- picture: first run -->
#
# Half of lesson 01's residents belong to the optimizer. Now you write it, from gradient descent to AdamW. Section 8 says
# why the bar above gets no shorter. After this lesson you can
#
# - write Adam and AdamW, and say what each line does;
# - say how many bytes its states take, and *when* they appear;
# - explain why Adam stalls in bf16, with exact numbers;
# - say what the step of each of PyTorch's variants needs.

# %%
from math import sqrt

import torch
from torch import nn

from gradmem_lib import MemoryTracker, check, predict_first, show_losses, show_paths
from gradmem_lib.course import models, texts

threads = torch.get_num_threads()
torch.set_num_threads(1)  # fastest for small tensors

# %% [markdown]
# ## 1 · Downhill
#
# An optimizer loops over parameters. Inside, a **rule** updates one parameter. A rule gets the parameter, its gradient, a
# dict in which it may keep things until the next step, and settings such as lr. The rule `sgd` is plain gradient descent:


# %%
class ByHand(torch.optim.Optimizer):
    """Calls ``rule(p, grad, state, **settings)`` for every parameter that has a gradient."""

    def __init__(self, params, rule, **settings):
        super().__init__(params, settings)
        self.rule, self.settings = rule, settings

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad, self.state[p], **self.settings)


def sgd(p, grad, state, lr):
    p.sub_(lr * grad)


# %% [markdown]
# Note the underscore of `sub_`: it changes `p` **in place**. `p = p - lr * grad` would make a new tensor, call it `p`
# until the end of the function, and leave the model as it was.
#
# You will try each rule in two places. The first is a valley with two parameters. It is thirty times steeper in one
# direction than in the other, and every gradient is noisy, like the gradient of a small batch.
# <!-- holds: steepness[1] == 30 * steepness[0] -->

# %%
minimum, steepness = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 30.0])


def valley(p):
    return (steepness * (p - minimum) ** 2).sum(-1) / 2


def descend(rule, steps=60, **settings):
    p = nn.Parameter(torch.tensor([-3.0, 2.0], dtype=torch.float64))
    optimizer, noise = ByHand([p], rule, **settings), torch.Generator().manual_seed(0)
    path = [p.detach().clone()]
    for _ in range(steps):
        p.grad = steepness * (p.detach() - minimum) + torch.randn(2, generator=noise)
        optimizer.step()
        path.append(p.detach().clone())
    return torch.stack(path)


# %% [markdown]
# The second place is a very small Llama that learns to predict real text, byte by byte:

# %%
text = bytearray(texts.language_reference().encode("ascii", "ignore"))
text = torch.frombuffer(text, dtype=torch.uint8).long()
rows = text[: len(text) // 64 * 64].view(-1, 64)


def train(rule, steps=60, **settings):
    llama = models.tiny_llama(layers=2, hidden=64, heads=4, intermediate=172, vocab=128)
    optimizer, losses = ByHand(llama.parameters(), rule, **settings), []
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = rows[torch.randint(len(rows), (8,), generator=draw)]
        loss = llama(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# %% [markdown]
# Here is SGD's path in the valley:

# %%
paths = {"SGD": descend(sgd, lr=0.06)}
curves = {"SGD": train(sgd, lr=0.3)}
marks = {"minimum": minimum.tolist()}
show_paths(valley, paths, title="SGD in the valley", marks=marks)

# %% [markdown]
# Across the valley the step is nearly too long, and the path jumps from side to side. Along the valley the step is
# short. One learning rate must serve both directions.
#
# ## 2 · Momentum: remember where you were going
#
# Jumps in opposite directions cancel in an average, and steady progress stays. So keep a moving average m of the
# gradients g,
#
# $$m \leftarrow \beta\, m + (1 - \beta)\, g$$
#
# and step along it: $p \leftarrow p - \text{lr} \cdot m$. This memory costs the first bytes: m is as large as the
# parameter.
#
# ### Exercise 2.1 · momentum
#
# ●○○ · 4 minutes · trains: a moving average, and changing a tensor in place
#
# Write `momentum(p, grad, state, lr, beta)`. `state` is an empty dict at the first call, and you fill it. Change `p` in
# place, and return nothing. `p` may be a transposed matrix, which is not contiguous.
#
# <details><summary>Hint 1: the first call</summary>
#
# `if not state: state["m"] = torch.zeros_like(p)`. Without the `if`, every step forgets the steps before.
#
# <details><summary>Hint 2: the average, in place</summary>
#
# `m.mul_(beta)` keeps the old share. `m.add_(grad, alpha=1 - beta)` adds the gradient's share.
#
# </details></details>


# %%
def momentum(p, grad, state, lr, beta):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_02/exercises.py


momentum = check("2.1", momentum)

# %%
paths["momentum"] = descend(momentum, lr=0.06, beta=0.9)
curves["momentum"] = train(momentum, lr=0.3, beta=0.9)
show_paths(valley, paths, title="with momentum: no more zigzag", marks=marks)

# %% [markdown]
# The learning rate is the same, and the zigzag is now a slow swing. Along the valley it starts no faster, because the
# average of small gradients is small.
# <!-- holds: (paths["momentum"] - minimum)[20, 0].abs() >= 0.9 * (paths["SGD"] - minimum)[20, 0].abs() -->
#
# ## 3 · The second moment: a step size for every number
#
# Where gradients are always large, a step should be shorter. Where they are always small, it should be longer. So
# keep a moving average v of the **squared** gradient, the **second moment** (m is the first), and divide by its root:
#
# $$v \leftarrow \beta\, v + (1 - \beta)\, g^2 \qquad\qquad p \leftarrow p - \text{lr} \cdot \frac{g}{\sqrt{v} + \epsilon}$$
#
# The gradient is squared because gradients that jump between +1 and −1 are large, although their average is zero. ε avoids
# a division by 0 where v is 0; usually it is $10^{-8}$. It stands *outside* the root. Inside, $\sqrt{10^{-8}} = 10^{-4}$
# would hide every smaller gradient.
#
# ### Exercise 2.2 · the second moment
#
# ●○○ · 4 minutes · trains: one step size for every number of a parameter
#
# Write `second_moment(p, grad, state, lr, beta, eps)`: the two formulas above, without momentum.
#
# <details><summary>Hint 1: the order</summary>
#
# First add the new gradient to v, then divide by the root of v.
#
# <details><summary>Hint 2: the square</summary>
#
# `v.mul_(beta).add_(grad * grad, alpha=1 - beta)`.
#
# </details></details>


# %%
def second_moment(p, grad, state, lr, beta, eps):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_02/exercises.py


second_moment = check("2.2", second_moment)

# %% [markdown]
# In the valley, lr is now 0.1. Once $\sqrt v$ is as large as g, a step is about 0.1 long in each direction, whatever the
# slope. The *first* step is special: v starts at zero. With β = 0.999, after one gradient it is $0.001\, g^2$.

# %%
guess_a = predict_first(
    "2.a", "beta = 0.999: the first step is how many times as long as lr?", unit="times"
)

# %%
paths["second moment"] = descend(second_moment, lr=0.1, beta=0.999, eps=1e-8)
curves["second moment"] = train(second_moment, lr=0.003, beta=0.999, eps=1e-8)
show_paths(valley, paths, title="with the second moment alone", marks=marks)
show_losses(curves, title="the small Llama", smooth=5)
first = (paths["second moment"][1] - paths["second moment"][0]).abs()
guess_a.reveal(formula=1 / sqrt(1 - 0.999), measured=round(first[0].item() / 0.1, 3))

# %% [markdown]
# The path runs **diagonally**: both directions are equally fast now. But the first step is far too long. The small
# Llama's first steps are too long, too, and after a few of them its loss jumps above its start. The reason is v, which
# fills up slowly from zero.
#
# ## 4 · Bias correction, and Adam
#
# After t steps, the zero at the start still has the share $\beta^t$ of the average. The gradients have only the rest,
# $1 - \beta^t$. So divide by that:
#
# $$\hat m = \frac{m}{1 - \beta_1^t} \qquad \hat v = \frac{v}{1 - \beta_2^t} \qquad
# p \leftarrow p - \text{lr} \cdot \frac{\hat m}{\sqrt{\hat v} + \epsilon}$$
#
# with β₁ for m, β₂ for v, and t = 1 in the first step. Momentum, second moment and bias correction together are Adam
# (Kingma and Ba 2015). With β₁ = 0.9 too, and without the corrections, Adam's first step is 0.1 / √0.001 = {{0.1 / sqrt(0.001):.2f}} times lr.
#
# ### Exercise 2.3 · Adam
#
# ●●○ · 6 minutes · trains: both moments together, and the bias correction
#
# Write `adam(p, grad, state, lr, beta1, beta2, eps)`. Keep m, v and the count t in `state`.
#
# <details><summary>Hint 1: the state</summary>
#
# `if not state: state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))`, and then `state["t"] += 1` before
# anything is divided.
#
# <details><summary>Hint 2: the moments</summary>
#
# The update lines of 2.1 and 2.2, with `beta1` for m and `beta2` for v.
#
# <details><summary>Hint 3: the step</summary>
#
# `m_hat = m / (1 - beta1**t)` and `v_hat = v / (1 - beta2**t)` are new tensors, so that m and v stay what they are.
# Then `p.sub_(lr * m_hat / (v_hat.sqrt() + eps))`.
#
# </details></details></details>


# %%
def adam(p, grad, state, lr, beta1, beta2, eps):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_02/exercises.py


adam = check("2.3", adam)

# %%
usual = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
paths["Adam"] = descend(adam, lr=0.2, **usual)
curves["Adam"] = train(adam, lr=0.01, **usual)
show_paths(valley, paths, title="Adam: no leap, no zigzag", marks=marks)
first = (paths["Adam"][1] - paths["Adam"][0]).abs()
print(f"first step: {first[0]:.3f} along the valley, {first[1]:.3f} across it")

# %% [markdown]
# The first step is lr long, 0.2, in both directions. With $\hat m = g$ and $\hat v = g^2$, the ratio is the
# sign of g. Adam's learning rate is a *length*, and SGD's is a factor.
#
# ## 5 · AdamW: where the W goes
#
# Weight decay pulls every weight a little towards zero. The old way adds $\lambda p$ to the gradient, where λ is the
# `weight_decay`. In SGD that works. In Adam the added part goes through m and is divided by $\sqrt{v}$,
# so weights with large gradients hardly decay. AdamW (Loshchilov and Hutter 2019) **decouples** the decay: first it
# shrinks p, then it does Adam with the gradient as it is.
#
# $$p \leftarrow (1 - \text{lr} \cdot \lambda)\, p$$
#
# ### Exercise 2.4 · AdamW
#
# ●●○ · 4 minutes · trains: decoupled weight decay: where the W goes
#
# Write `adamw(p, grad, state, lr, beta1, beta2, eps, weight_decay)`. You may call your `adam`.
#
# <details><summary>Hint 1: one line more</summary>
#
# You need one line before Adam. It changes neither `grad` nor `state`.
#
# <details><summary>Hint 2: that line</summary>
#
# `p.mul_(1 - lr * weight_decay)`.
#
# </details></details>


# %%
def adamw(p, grad, state, lr, beta1, beta2, eps, weight_decay):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_02/exercises.py


adamw = check("2.4", adamw)

# %%
both = {"Adam": paths["Adam"], "AdamW": descend(adamw, lr=0.2, weight_decay=0.5, **usual)}
curves["AdamW"] = train(adamw, lr=0.01, weight_decay=0.1, **usual)
marks["zero"] = [0.0, 0.0]
show_paths(valley, both, title="a strong decay pulls to zero", marks=marks)
show_losses(curves, title="the small Llama, all five rules", smooth=5)

# %% [markdown]
# In the valley the decay is fifty times the usual 0.01, so that you can see it. AdamW stops before the minimum,
# where the decay balances Adam's step m̂ / √v̂ (and not the gradient). On the text the decay is small, and Adam and AdamW
# run side by side.
#
# ## 6 · Watch the bytes appear
#
# Take two steps of SmolLM2-135M, in float32, with your AdamW.

# %%
torch.set_num_threads(threads)
smol, tokenizer = models.smollm2()
n = sum(p.numel() for p in smol.parameters())
print(f"{n:,} parameters, {smol.dtype}")
guess_b = predict_first(
    "2.b", "SmolLM2 with your AdamW: how many bytes of optimizer states appear?"
)

# %%
smol_ids = texts.batch(tokenizer, batch_size=1, seq_len=32)
optimizer = ByHand(smol.parameters(), adamw, lr=1e-5, weight_decay=0.01, **usual)
with MemoryTracker(smol, optimizer, title="SmolLM2 and your AdamW: two steps") as tracker:
    for _ in range(2):
        smol(input_ids=smol_ids, labels=smol_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

# %%
guess_b.reveal(formula=8 * n, measured=tracker.current.by_category["optimizer"])
del smol, optimizer  # 1.5 GiB

# %% [markdown]
# The first forward has no states. All appear in the first `step()`, parameter by parameter: the slope in the picture.
# The spike at each step's start is your rule's temporaries for the embedding, the largest parameter.
# <!-- holds: tracker.peak.by_category["temporaries"] == 5 * 4 * 49_152 * 576 -->
#
# Your states have the dtype of the parameters, because `zeros_like(p)` has it. The next cell lists what PyTorch's AdamW
# keeps for a bf16 parameter of 1,000 numbers:

# %%
p = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
p.grad = torch.ones_like(p)
theirs = torch.optim.AdamW([p])
theirs.step()
for name, kept in theirs.state[p].items():
    print(f"{name:<11} {kept.dtype} {kept.nbytes:>5,} bytes")

# %% [markdown]
# PyTorch's t is a tensor, and yours a number. m and v take **8 bytes a parameter in float32, 4 in bf16.**
#
# ## 7 · What bf16 moments cost
#
# A bf16 number has 8 bits of precision, 7 of them after the point. So there are 128 numbers from 1 to 2, then 128 from
# 2 to 4 with gaps twice as wide, and 128 from 1/2 to 1 with gaps half as wide.
# <!-- holds: every.unique().numel() == 128 and torch.finfo(bf16).eps == 2**-7 -->
# If you add less than half a gap, the sum is rounded back to the old number.
# <!-- holds: torch.equal(every + 0.99 / 256, every) -->
#
# Let every gradient be 1, so that v should rise to 1. Each step adds $0.001 \cdot 1^2$. How large is v when the sum
# is rounded back to v?

# %%
guess_c = predict_first("2.c", "What percentage of 1 does v reach in bf16?", unit="%")

# %% [markdown]
# Follow v for 10,000 steps: 2,000 with a gradient of 1, then 8,000 with 0.01.

# %%
gradients = [1.0] * 2000 + [0.01] * 8000


def track_v(dtype, beta2):
    v, seen = torch.zeros((), dtype=dtype), []
    for g in gradients:
        g = torch.tensor(g, dtype=dtype)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        seen.append(v.item())
    return seen


# %%
bf16 = torch.bfloat16
runs = [track_v(torch.float32, 0.999), track_v(bf16, 0.999), track_v(bf16, 0.95)]
print("  step   float32      bf16   bf16, beta2 = 0.95")
for step in (100, 400, 500, 2000, 4000, 10000):
    print(f"{step:>6}", *(f"{v[step - 1]:>9.3g}" for v in runs))
guess_c.reveal(measured=100 * max(runs[1]))

# %% [markdown]
# In bf16, v climbs to {{max(runs[1]):g}} and **stops**. <!-- holds: runs[1][-1] == max(runs[1]) -->
# From there on half a gap is {{max(runs[1]) / 256:.5f}}, more than 0.001. After step 2000 gradients are a hundred times
# smaller. <!-- holds: gradients[0] == 100 * gradients[-1] -->
# float32 forgets the large ones, and bf16 *never* does. By then m is 0.01, like the gradients. At step 10,000 a step
# in bf16 is $0.01 / \sqrt{ {{runs[1][-1]:g}} } = {{0.01 / sqrt(runs[1][-1]):.3f}}$ lr long. In float32 it is
# $0.01 / \sqrt{ {{runs[0][-1]:.3g}} } = {{0.01 / sqrt(runs[0][-1]):.1f}}$ lr.
#
# v never falls because `v.mul_(0.999)`, the first half of each step, rounds back to v. The steps stay too short, training
# stalls, and no error is raised. What to do:
#
# - **float32 moments** beside bf16 weights: 8 bytes for each parameter again, as in the master recipe of lesson 01;
# - **a smaller β₂**, such as 0.95: then a step takes 5 % off v, more than a gap, and v follows the gradients up and
#   down. The table's last column shows it ({{runs[2][1999]:.2f}}, not 1, is rounding);
# - **float32 weights** under autocast: then the moments are float32 too. A bf16 weight of 1 does not notice a step of 0.001.
#   <!-- holds: every[0] - 0.001 == every[0] == 1 -->
#
# ## 8 · What the step itself needs
#
# Temporaries come and go within `step()`, and lesson 01 showed that the peak may be there. The next cells measure
# PyTorch's three variants of AdamW on lesson 01's tiny Llama of {{sum(sizes) // 4:,}} parameters:
#
# - a plain loop over parameters (`foreach=False`);
# - `foreach`, which does each operation for all parameters at once;
# - `fused`, one program of the card (a *kernel*) for the whole step, and the default of Hugging Face's `Trainer`.

# %%
guess_d = predict_first(
    "2.d", "Lesson 01's tiny Llama in float32: bytes of temporaries in a foreach step?"
)


# %%
def on_top(kind, **settings):
    llama = models.tiny_llama()
    optimizer = kind(llama.parameters(), **settings)
    for p in llama.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # makes the states
    with MemoryTracker(llama, optimizer, live=False) as tracker:
        optimizer.step()
    return tracker.peak.total - tracker.current.total


# %%
AdamW = torch.optim.AdamW
needed = {
    "plain": on_top(AdamW, foreach=False),
    "foreach": on_top(AdamW, foreach=True),
    "fused": on_top(AdamW, fused=True),
}
sizes = [p.nbytes for p in models.tiny_llama().parameters()]
for name, nbytes in needed.items():
    print(f"{name:<13} {nbytes / max(sizes):>3.1f} × the largest parameter")
guess_d.reveal(formula=sum(sizes), measured=needed["foreach"])

# %% [markdown]
# `foreach` takes the root of *all* v's before it divides by any. That is **a temporary copy of the whole model.** On a
# card AdamW uses `foreach` unless you say `foreach=False` or `fused=True`.
#
# `gradmem_lib/techniques/adam.py` has the lines that you wrote.
#
# Give lesson 00's last run the fused step:

# %%
from gradmem_lib.course import first_run

first_run(optimizer="adamw-fused")

# %% [markdown]
# The optimizer's step is down from 128.3 MiB to the residents. But the peak is at the loss, where no optimizer runs, so
# the error stays.
#
# ## 9 · What you can now do
#
# - **Adam** is two moving averages, corrected, and one division. The **W** shrinks p itself and leaves the gradient
#   alone.
# - **States** appear in the first `step()`, two numbers a parameter in the parameter's dtype: 8 bytes in float32, 4 in
#   bf16.
# - **v stalls in bf16**: with β₂ = 0.999, it can rise but never fall.
#   <!-- holds: runs[1] == sorted(runs[1]) -->
# - **A step's temporaries** are none (`fused`), or up to a copy of the model (`foreach`).
#   <!-- holds: needed["foreach"] == sum(sizes) and needed["fused"] == 0 -->
#
# Next: batches that do not fit.
#
# ## Optional: why v never falls, and where the fused kernel stops
#
# In section 7's table, v in bf16 is *above* float32's up to step 500, and it never falls.
# <!-- holds: all(runs[1][step] > runs[0][step] for step in (99, 399, 499)) --> Why? Each step should first
# take something away: `v.mul_(0.999)`. The next cell counts the bf16 numbers that become smaller:

# %%
every = torch.arange(128, 256).to(bf16) / 128  # all bf16 numbers from 1 to 2
for beta2 in (0.999, 0.95):
    smaller = (every * beta2 < every).sum().item()
    print(f"v * {beta2:<5} is smaller than v for {smaller} of the 128 numbers")

# %% [markdown]
# With 0.999, none becomes smaller: `v.mul_(0.999)` rounds back to v. So v takes every addition, rounded to whole
# gaps, until the additions stop counting. It never falls.
#
# PyTorch's `fused=True` stalls elsewhere. It computes $v + 0.001\,(g^2 - v)$ in float32 and rounds once. The next cell shows where its v stops:

# %%
p = nn.Parameter(torch.zeros(1, dtype=bf16))
fused, seen = torch.optim.AdamW([p], fused=True), []
for g in gradients[:4000]:
    p.grad = torch.full_like(p, g)
    fused.step()
    seen.append(fused.state[p]["exp_avg_sq"].item())
print(f"v after 2000 steps: {seen[1999]}, after 4000: {seen[3999]}")

# %% [markdown]
# What the fused kernel adds gets smaller as v rises: at {{seen[-1]:g}} it is 0.001 · (1 − {{seen[-1]:g}}) =
# {{0.001 * (1 - seen[-1]):.5f}}, and half a gap is {{seen[-1] / 256:.5f}}. So its v stops at half of what v reached in
# section 7, and never falls either. <!-- holds: seen[1999] == seen[-1] == max(runs[1]) / 2 -->
#
# ## Optional: AdamW with one temporary
#
# The plain loop needs two copies of the largest parameter here.
# How many does your rule of exercise 2.4 need?

# %%
by_hand = dict(lr=1e-3, weight_decay=0.01, **usual)
yours = on_top(ByHand, rule=adamw, **by_hand)
print(f"exercise 2.4 needs {yours / max(sizes):.1f} × the largest parameter")

# %% [markdown]
# Written as in the hints, it needs five. If yours needs fewer, you named fewer tensors: one without a name is freed
# sooner. You can do better, with **one**.
#
# ### Exercise 2.6 · AdamW with one temporary
#
# ●●● · 9 minutes · optional · trains: in-place arithmetic under a byte budget
#
# Write `frugal_adamw` with the arguments of `adamw` and the same result. At no moment may more than one tensor as large
# as `p` be alive beside p, its gradient, m and v. Leave `grad` as it is. The check's budget is these bytes, and a few
# more for scalars. Arrays of numpy count too.
#
# <details><summary>Hint 1: who makes tensors?</summary>
#
# `a * b`, `a / b`, `a + b` and `a.sqrt()` each make one. `a.mul_(b)`, `a.div_(b)` and `a.add_(b)` make none. You can
# chain them: `x.sqrt().div_(c).add_(eps)` makes one tensor in all.
#
# <details><summary>Hint 2: the corrections are numbers</summary>
#
# $1 - \beta_1^t$ is a plain number: put it into the learning rate. The root of $1 - \beta_2^t$ is a plain number too,
# and $\sqrt{v / c} = \sqrt v / \sqrt c$.
#
# <details><summary>Hint 3: two operations that help</summary>
#
# `v.addcmul_(grad, grad, value=a)` is v + a · grad · grad, and `p.addcdiv_(m, d, value=a)` is p + a · m / d. Both work
# in place, with no tensor in between.
#
# </details></details></details>


# %%
def frugal_adamw(p, grad, state, lr, beta1, beta2, eps, weight_decay):
    ### BEGIN SOLUTION
    if not state:
        state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
    state["t"] += 1
    t, m, v = state["t"], state["m"], state["v"]
    p.mul_(1 - lr * weight_decay)
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    divisor = v.sqrt().div_(sqrt(1 - beta2**t)).add_(eps)
    p.addcdiv_(m, divisor, value=-lr / (1 - beta1**t))
    ### END SOLUTION


frugal_adamw = check("2.6", frugal_adamw)

# %%
yours = on_top(ByHand, rule=frugal_adamw, **by_hand)
print(f"your step needs {yours / max(sizes):.1f} × the largest parameter")

# %% [markdown]
# ## Optional: a puzzle of groups
#
# An optimizer may have several groups of parameters, and steps one group after the other. With `foreach` it copies only
# the group that it steps, and it launches its kernels once a group. So there is something between a plain loop, with few
# temporaries and many launches, and one group with all.
#
# A puzzle has two targets: bytes, and a price in time. The price is counted, so it is the same on every machine. When both
# are met, the check passes. It also says what the best known choice takes.
#
# ### Exercise 2.7 · nine tensors in groups
#
# ●●○ · 5 minutes · optional · trains: a step's temporaries against its launches
#
# Nine parameters have 44, 42, 37, 29, 23, 21, 17, 14 and 9 KiB, in float32. Put them into groups: a list of lists of these
# numbers, such as `[[44, 9], [42], ...]`. AdamW's `foreach` step may peak at **1 MiB**, and take **4 groups**. Three are
# possible.
#
# <details><summary>Hint 1: what is left for the copy</summary>
#
# The nine are 236 KiB. Weights, gradients and both moments are four times as much, and step counters take a few bytes.
#
# <details><summary>Hint 2: three groups</summary>
#
# Largest first, each into the first group with room for it, gives four groups. For three, each group must be nearly
# full: which two tensors are 79 KiB together?
#
# </details></details>

# %%
from gradmem_lib.course import PACKING

groups = [[44, 21, 14], [42, 37], [29, 23, 17, 9]]  # SOLUTION
check("2.7", groups)
PACKING.show(groups)

# %% [markdown]
# ## Optional: more practice
#
# ### Exercise 2.5 · the gaps between bf16 numbers
#
# ●●○ · 5 minutes · optional · trains: reading a float format: which additions change nothing
#
# Write `half_gap(x)` for a bf16 number x > 0, given as a float of Python: half the distance from x to the next larger bf16
# number. Anything smaller than this, added to x, changes nothing.
#
# <details><summary>Hint 1: at 1</summary>
#
# From 1 to 2 there are 128 numbers, so the gap is 1/128. Half of it is 1/256, which is 2⁻⁸.
#
# <details><summary>Hint 2: elsewhere</summary>
#
# The gap is the same from one power of two to the next. `math.floor(math.log2(x))` is the exponent of the power of two
# at or below x.
#
# </details></details>

# %%
from math import floor, log2


def half_gap(x):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_02/exercises.py


half_gap = check("2.5", half_gap)
