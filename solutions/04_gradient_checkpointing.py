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
# # 04 · Gradient checkpointing
#
# *60 minutes: sections 1 to 7, with exercises 4.1, 4.5 and 4.6. 55 more are optional. You need: lesson 01.*
#
# <!-- picture: first run -->
#
# Why does forward store so much? Backward will need it. But most of it could be computed again, from much less.
# This trade of work for memory is called gradient checkpointing. Its famous rule, a checkpoint every √n layers, is
# wrong for most models that people train. Afterwards you can
#
# - write a checkpoint yourself, and say what PyTorch's does better;
# - find the best segments for *your* model, and know when √n is not it;
# - say before you run it where checkpointing will not help.

# %%
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import MemoryTracker, check, checkpoint_layers, predict_first
from gradmem_lib.course import claims, models, texts

# %% [markdown]
# ## 1 · What forward could forget
#
# You have a chain of 16 equal layers: GELU, Linear, GELU, Linear, and a shortcut. For its backward, each layer keeps five
# times the bytes of its input: the input itself, and four times as much inside. The weights are frozen and only the
# *input* is trained. So you see almost only activations.
#
# A **boundary** is the tensor that one layer hands to the next. It has **x** bytes. A layer keeps **a** bytes in all,
# its input included. Here a = 5 x.

# %%
layers = models.chain(16, width=64, keeps=5)
inputs = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def boundaries(snapshot):
    """Bytes beside the weights, in boundaries."""
    return round((snapshot.total - snapshot.by_category["parameters"]) / inputs.nbytes)


with MemoryTracker(layers, live=False) as tracker:
    out = layers(inputs)
    print("alive after forward:", boundaries(tracker.current), "boundaries")

# %% [markdown]
# These are 16 × 5 boundaries, and the last output. Now suppose that each layer keeps *only* its input.
# When backward reaches a layer, the layer runs forward once more, with autograd recording, and backward goes on from
# there.
#
# You can write this as an `autograd.Function`: an operation whose backward is your own. Here is a small one. `ctx` keeps
# what forward hands to backward. Backward gets the gradient of the output, and returns one value for each argument of
# forward, in the same order.


# %%
class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, x):
        ctx.n = n
        ctx.save_for_backward(x)  # tensors
        return x**n

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, gradient * ctx.n * x ** (ctx.n - 1)  # n needs no gradient


two = torch.tensor(2.0, requires_grad=True)
Power.apply(3, two).backward()
print("3 · 2² is", two.grad.item())

# %% [markdown]
# ### Exercise 4.1 · a checkpoint by hand
#
# ●●○ · 10 minutes · trains: what autograd keeps, and how to run a layer again inside backward
#
# Write the two halves of `Checkpoint`. `Checkpoint.apply(run, x)` must return `run(x)` and keep only `x`. Its backward
# returns `None` for `run`, and the gradient of `x`. The weights inside `run` must get their gradients as well, added to
# `.grad`.
#
# <details><summary>Hint 1: forward</summary>
#
# `ctx.save_for_backward(x)` keeps a tensor, and `ctx.run = run` keeps anything else. Inside a Function's `forward`
# autograd is off already, so you need no `torch.no_grad()`.
#
# <details><summary>Hint 2: backward, the second run</summary>
#
# `(x,) = ctx.saved_tensors`. Autograd is off here too, and `torch.enable_grad()` switches it on. Start the second run from
# a tensor that has the numbers of `x`, and no graph behind it. Otherwise backward continues into the layers before.
#
# <details><summary>Hint 3: backward, the gradients</summary>
#
# Start from `x.detach().requires_grad_()`. `torch.autograd.backward(out, gradient)` goes through the new graph, and
# leaves gradients in the weights and in `x.grad`.
#
# </details></details></details>


# %%
class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        ### BEGIN SOLUTION
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad
        ### END SOLUTION


Checkpoint = check("4.1", Checkpoint)


# %%
def forward(run, net, x):
    for layer in net:
        x = run(layer, x)
    return x


with MemoryTracker(layers, live=False) as tracker:
    out = forward(Checkpoint.apply, layers, inputs)
    print("alive after forward:", boundaries(tracker.current), "boundaries")

# %% [markdown]
# 16 inputs and one output are alive. The next picture shows a whole step under your checkpoint; the outline is
# a step with everything kept. The backward has teeth: what are they? (Waiting boundaries were made with autograd off, so
# the tracker draws them as temporaries.)

# %%
del out
with MemoryTracker(layers, live=False, title="all kept") as kept:
    layers(inputs).square().sum().backward()
inputs.grad = None
with MemoryTracker(layers, live=False, title="your checkpoint") as tracker:
    forward(Checkpoint.apply, layers, inputs).square().sum().backward()
print("peak with your checkpoint:", boundaries(tracker.peak), "boundaries")
print("peak with all kept:", boundaries(kept.peak), "boundaries")
tracker.show(beside=kept)

# %% [markdown]
# Each tooth is a layer that runs again, is used, and is freed. Your peak, 16 + 5 + 9 = 30, is in the backward of the
# last layer:
#
# - 16 boundaries wait, one for each layer;
# - the last layer has run again, and has its 4 boundaries inside and its output, so 5 more;
# - 9 are gradients on their way through that layer: 4 on each side of the second GELU, 1 for the shortcut.
#
# **Waiting boundaries, one layer in full, and gradients on their way**: the rest of this lesson follows from this sum.
#
# ## 2 · PyTorch's own
#
# `torch.utils.checkpoint.checkpoint(run, x, use_reentrant=...)` comes in two kinds. With `True` it is an
# `autograd.Function` like yours. It calls backward *inside* backward, so it enters autograd's engine a second time: it
# is reentrant. With `False`, a hook drops each tensor that the graph would save. When backward asks for the first of
# them, forward runs again.
#
# | | `use_reentrant=True` | `use_reentrant=False` |
# |---|---|---|
# | the input must require a gradient | yes (a warning if not) | no |
# | keyword arguments for `run`; works with `torch.autograd.grad` | no | yes |
# | the second run | goes to the end | stops when the last missing tensor is there |
# | notices a second run that differs | no | where shapes or dtypes differ |
#
# The first row is a trap: behind a frozen embedding, no layer under a reentrant checkpoint learns (exercise 4.3). From
# here on we use `use_reentrant=False`.
#
# What if a layer that runs twice has *dropout*? PyTorch's checkpoint notes the state of the random number generator
# before the first run, and runs again from that state. Yours drops other values in its second run. Backward then computes
# the gradient of a network that never ran, and nothing warns you. (An optional section measures it, and exercise 4.2
# corrects it.) One thing to watch with PyTorch's, too: **batch norm** updates its running statistics twice a step.
#
# ## 3 · Segments
#
# With n layers, one checkpoint a layer keeps n boundaries. With k layers in one checkpoint, only n / k boundaries are
# kept. But when backward reaches such a **segment**, all its k layers are in memory at once.
#
# `checkpoint_layers(net, every=3)` makes segments of three. `record_schedule` watches one real step. In its
# picture, layers go from bottom to top, and time from left to right.

# %%
from gradmem_lib import explore_schedule, record_schedule, show_schedule

nine = models.chain(9, width=64, keeps=5)
with checkpoint_layers(nine, every=3):
    threes = record_schedule(nine, lambda: nine(inputs).sum().backward())
show_schedule(threes, title="9 layers in segments of 3")

# %% [markdown]
# The thin lines are waiting boundaries. Three times, a segment runs forward again, is in memory in full (a small
# triangle), and is freed by backward.
# <!-- holds: [event.layer for event in threes.events if event.kind == "recompute"] == [6, 7, 8, 3, 4, 5, 0, 1, 2] -->
#
# Now take a chain of 64 layers that keep only their input: a = x.

# %%
guess_b = predict_first("4.b", "Which segment length has the lowest peak?", unit="layers")

# %% [markdown]
# Move the segment length, and see where the peak is lowest. Then let layers keep more (a/x). Before you move that control,
# say whether the best length will grow or shrink.

# %%
explore_schedule(depth=64)

# %% [markdown]
# ## 4 · The best segment length
#
# One formula gives all these peaks.
#
# ### Exercise 4.5 · the peak of a schedule
#
# ●●○ · 5 minutes · trains: finding the segment whose backward needs the most
#
# Write `kept_at_peak(lengths, a, x)`: the most bytes that segments of these `lengths`, in the order of forward, keep at
# once. A layer keeps `a` bytes, of which `x` are its input. Do not count the gradients on their way.
#
# <details><summary>Hint 1: when</summary>
#
# Take the moment when a segment has just run again. Its own layers are there in full. What else is there?
#
# <details><summary>Hint 2: how many boundaries</summary>
#
# Those of *earlier* segments still wait, and those of later ones are gone. The segment's own boundary is the input of
# its first layer, which `a` counts already.
#
# <details><summary>Hint 3: in code</summary>
#
# For segment number i, counted from 0, of m layers: `i * x + m * a`. Take the largest.
#
# </details></details></details>


# %%
def kept_at_peak(lengths, a, x):
    ### BEGIN SOLUTION
    return max(i * x + m * a for i, m in enumerate(lengths))
    ### END SOLUTION


kept_at_peak = check("4.5", kept_at_peak)

# %% [markdown]
# For n layers in segments of k, the last segment has n/k − 1 boundaries before it. So the peak is about **n/k · x + k ·
# a**. The next cells compare your formula with the chain of your guess:

# %%
from gradmem_lib import uniform_segments


def peak(layers, every, step):
    """Bytes at the peak of ``step()``, beside the weights."""
    with checkpoint_layers(layers, every):
        return record_schedule(layers, step).peak


# %%
chain, x = models.chain(64, width=64, keeps=1), inputs.nbytes
peaks = {}
print("  k  your formula, with gradients    measured")
for k in (1, 2, 4, 8, 16, 32, 64):
    formula = kept_at_peak(uniform_segments(64, k), x, x) + 3 * x + 8
    peaks[k] = peak(chain, k, lambda: chain(inputs).abs().sum().backward())
    print(f"{k:>3}{formula:>30,}{peaks[k]:>12,}")
guess_b.reveal(formula=64**0.5, measured=min(peaks, key=peaks.get))

# %% [markdown]
# The peak is lowest at √64, as the explorer drew it. With 3 boundaries of gradients on their way (and 8 bytes for the loss and
# its gradient) your formula is right to the byte.
# <!-- holds: peaks == {k: (kept_at_peak(uniform_segments(64, k), 1, 1) + 3) * inputs.nbytes + 8 for k in peaks} -->
#
# Some guides say that more checkpoints mean more memory and less recomputation. More checkpoints need more memory only
# if their segments are shorter than the best.
# <!-- holds: peaks[1] > peaks[2] > peaks[4] > peaks[8] < peaks[16] < peaks[32] < peaks[64] -->
# They recompute less only if segments are very short: each layer runs once more, whatever k is, and only a segment's last
# product is spared. Recomputing is up to a third more work, and up to half where weights are frozen. <!-- holds: 0.32 < more[0] < 1 / 3 and 0.49 < more[1] < 1 / 2 -->
#
# The last row is one checkpoint around the whole model. After forward hardly anything is left. Then backward asks for
# the last layer, and everything comes back at once. **At the peak, a checkpoint saves only what is outside the
# segment that runs again.** So do not measure after forward.

# %%
claims.show("C27", "C21")

# %% [markdown]
# ## 5 · A real Transformer
#
# If a layer keeps more than its input, a segment costs more and a boundary costs the same. Where is the peak
# lowest then?
#
# ### Exercise 4.6 · the best segment length
#
# ●●○ · 5 minutes · trains: deriving the rule, and knowing when the root of n is not it
#
# Write `best_length(n, a, x)`: the whole number k from 1 to n for which `uniform_segments(n, k)` has the lowest peak.
# (`uniform_segments(10, 4)` is `[4, 4, 2]`.)
#
# <details><summary>Hint 1: by calculus</summary>
#
# n/k · x + k · a is lowest where its two terms are equal.
#
# <details><summary>Hint 2: solved for k</summary>
#
# k = √(n · x / a). Round it, try its neighbours, and mind that k is at least 1 and at most n.
#
# <details><summary>Hint 3: by trying</summary>
#
# Or take the best of all k from 1 to n by `kept_at_peak(uniform_segments(n, k), a, x)`.
#
# </details></details></details>


# %%
def best_length(n, a, x):
    ### BEGIN SOLUTION
    lengths = range(1, n + 1)
    return min(lengths, key=lambda k: kept_at_peak(uniform_segments(n, k), a, x))
    ### END SOLUTION


best_length = check("4.6", best_length)

# %% [markdown]
# How large is a, in boundaries, for layers that people train? Lesson 01's formulas tell you. The next cell compares
# √n with your `best_length`, with their peaks:

# %%
from gradmem_lib import accounting

print("bf16, 1 × 1024 tokens      a/x  √n: GiB   best k: GiB")
for name in ("SmolLM2-135M", "Llama-2-7B", "Llama-2-70B"):
    shape = accounting.SHAPES[name]
    a = sum(accounting.block_activations(shape, 1, 1024).values())
    n, x = shape.layers, 2 * 1024 * shape.hidden
    print(f"{name:<14}{n:>3} layers {a / x:>8.1f}", end="")
    for k in (round(n**0.5), best_length(n, a, x)):
        print(f"{k:>5}: {kept_at_peak(uniform_segments(n, k), a, x) / 2**30:.2f}", end="")
    print()

# %% [markdown]
# A block keeps more than twenty times its input. So √(n · x / a) is between 1 and 2, for 30 layers and for 80. **One
# checkpoint a layer**, transformers' default, peaks at most a fifth above the best k, and √n two to three times as
# high.
# <!-- holds: (n, best_length(n, a, x)) == (80, 2)
# and kept_at_peak([1] * 80, a, x) < 1.2 * kept_at_peak([2] * 40, a, x) -->
#
# Now measure SmolLM2's 30 blocks. They are frozen, and their input is trained.

# %%
smol, tokenizer = models.smollm2()
smol.requires_grad_(False)
ids = texts.batch(tokenizer, batch_size=1, seq_len=64)
embeds = smol.model.embed_tokens(ids).detach().requires_grad_()


def blocks():
    smol.model(inputs_embeds=embeds).last_hidden_state.square().sum().backward()


# %%
guess_c = predict_first("4.c", "30 frozen blocks: the best equal segments?", unit="layers")

# %%
with checkpoint_layers(smol, "best") as best:
    blocks()  # the first step measures each layer, and chooses
ratio = 1 + best.internal[0] / best.boundary[0]
print(f"measured a/x: {ratio:.2f}; chosen segments:", *best.segments)


def table(step):
    """Boundaries at the peak, by segments."""
    layers, ways = smol.model.layers, (1, 2, 5, "best")
    return {every: round(peak(layers, every, step) / embeds.nbytes, 1) for every in ways}


found = table(blocks)
print("boundaries:", found)
guess_c.reveal(
    formula=round((30 / ratio) ** 0.5, 2), measured=min((1, 2, 5), key=found.get)
)

# %% [markdown]
# A frozen matrix gets no gradient, so its input is not kept. So a is smaller than in the table above, and pairs of
# layers are a little better than single ones. <!-- holds: ratio < 20 and found[2] < found[1] < 1.1 * found[2] -->
# √30 ≈ 5 is far off. <!-- holds: found[5] > 1.5 * found[2] --> The rule holds with the a that is really there: **measure a,
# do not look it up**, as `"best"` did.
#
# <details><summary>And <code>every_n_layers</code> of transformers?</summary>
#
# `every_n_layers=k` is something else: it checkpoints one layer in k, and *keeps* the others.
#
# </details>
#
# ## 6 · All weights trained
#
# Now take the gradients of **all** of SmolLM2, on 64 tokens, without checkpoints and with one a layer. (`[30]` is one
# segment of all 30 layers. The last segment never runs again, so this run has no checkpoint.) How much lower is the peak?

# %%
guess_d = predict_first("4.d", "A checkpoint a layer: the peak falls by?", unit="percent")

# %%
smol.requires_grad_(True)
high = []
for every in ([30], 1):
    with checkpoint_layers(smol, every), MemoryTracker(smol, live=False) as tracker:
        smol(input_ids=ids, labels=ids).loss.backward()
    high.append(tracker.peak.total)
    kept = max(tracker.timeline.by_category["activations"])
    print(f"most activations {kept:>11,}, peak {high[-1]:>13,}")
    smol.zero_grad()
guess_d.reveal(measured=round(100 * (1 - high[1] / high[0])))

# %% [markdown]
# Not at all, although the activations fell to about a quarter. While backward frees activations, gradients grow by 4
# bytes a parameter. With few tokens the *end* of backward is the highest point, and no activation is left there to
# save. <!-- holds: tracker.peak.phase == "backward" and tracker.peak.by_category["activations"] < 100 -->
# So ask where the peak is before you choose a technique. Shallow networks win less too: with 4 layers, the one layer
# in full is a quarter of all. <!-- holds: kept_at_peak([1] * 4, 5, 1) / (4 * 5) > kept_at_peak([1] * 16, 5, 1) / (16 * 5) -->
#
# ## 7 · What you can now do
#
# - **The peak is waiting boundaries, one whole segment, and gradients on their way**.
# - **k = √(n·x/a).** √n is right where a ≈ x. Trained Transformers have a ≈ 20 x or more: one layer a segment, or
#   two.
# - **Look where the peak is first.** Full fine-tuning on few tokens peaks on gradients, not on activations.
#
# `with checkpoint_layers(model, every="best"):` measures a and x for you. Read `segments.py`, then `checkpointing.py`, in `gradmem_lib/techniques`.
#
# Here is lesson 00's last run, with a checkpoint on each layer too:

# %%
from gradmem_lib.course import first_run

first_run(optimizer="adamw-fused", accumulation=4, checkpointing="per-layer")

# %% [markdown]
# The error fell from 155.4 MiB to 115.8. What is left is mostly residents, and nothing so far shrinks them. Lesson 05
# puts all techniques together.
#
# ## Optional: beyond √n, with long segments first
#
# The *first* segment runs again last, when all other boundaries are gone. The last segment runs again first, when all
# boundaries are still there. So why should the two be equally long? `"best"` made the first ones longer.
#
# Choose a limit P for the peak. Boundaries that wait (▪) and one segment's layers (█) may fill it:
#
# ```
# ██████████
# ▪█████████
# ▪▪████████
# ```
#
# Each segment is x/a layers shorter than the one before. So the lengths fall in a straight line from P/a to 0, over P/x
# segments. The area under this line, P²/(2·a·x), is n. So **P = √(2·a·x·n)**. Equal segments need 2·√(a·x·n), √2 times
# as much: you save {{100 * (1 - 0.5**0.5):.0f}} % where the chain is long.
#
# `best_segments` finds the exact optimum in whole layers. In the next picture the waiting boundaries climb like a
# staircase, and the triangles beside them get smaller:

# %%
explore_schedule(depth=16, ratio=5, schedule="best segments")

# %% [markdown]
# In this picture the last segment is *not* run again: its backward begins at once. `checkpoint_layers` does the same
# for a list of lengths, so `[64]` is no checkpoint at all. (`every=3` runs its last segment again, and so keeps less
# beside the loss.) The next cell measures four ways on 64 layers with a = 5 x, and counts calls of layers beyond the 64
# of a forward:

# %%
from gradmem_lib import best_segments, extra_forwards

deep = models.chain(64, width=64, keeps=5)
unequal = best_segments(64, internal=4, boundary=1)  # internal: a without the input
for segments in ([64], [1] * 64, [4] * 16, unequal):
    high = peak(deep, segments, lambda: deep(inputs).square().sum().backward())
    print(
        f"{high // inputs.nbytes:>3} boundaries, {extra_forwards(segments):>2} more calls:",
        *segments,
    )

# %% [markdown]
# Nine boundaries in each line are gradients on their way. No equal segments need less than those of 4, and the unequal
# ones need almost a fifth less.
# <!-- holds: min((2, 4, 8, 1, 16, 32, 64), key=lambda k: kept_at_peak([k] * (64 // k), 5, 1)) == 4
# and 0.8 < high / inputs.nbytes / (kept_at_peak([4] * 16, 5, 1) + 9) < 0.84 -->
# They are not quite free: {{extra_forwards(unequal)}} more calls instead of {{extra_forwards([4] * 16)}}.
# The last segment is the only one that does not run again, and the last unequal one has a single layer.
#
# ### What comes after the layers
#
# After its last layer a model has logits and a loss, and all boundaries wait there. SmolLM2's logits are far wider
# than a boundary. The next cell measures its whole step, with frozen weights again:

# %%
smol.requires_grad_(False)
print("boundaries:", table(lambda: smol(inputs_embeds=embeds, labels=ids).loss.backward()))

# %% [markdown]
# Now segments of five win, the opposite of section 5, because fewer boundaries wait at the loss. `"best"` looks at
# the layers alone. It never peaks higher than one checkpoint a layer, and here it is not the lowest.
#
# ### Exercise 4.7 · 64 layers, their logits and a card
#
# ●●● · 10 minutes · optional · trains: choosing segments of unequal length where what comes after the layers counts too
#
# Write `train_step(layers, x)`: forward and backward of `layers(x).square().mean()`, returning the loss as a float. The
# first 63 layers have a = 5 x. The last one is a head, whose logits are five times as wide as a boundary.
# <!-- holds: stack[-1](start).numel() == 5 * start.numel() --> The peak must
# be at most the bytes of the card below, and each layer may run forward **twice** at most. Nothing may wait elsewhere,
# on the host or on a disk.
#
# The next cell shows two schedules that do not fit, and what head and loss need. In section 1, 9 boundaries were on
# their way in a layer's backward: `best_segments` takes that number as `temporaries`. `temporaries` and `internal`
# may be lists, one number a layer.

# %%
from gradmem_lib import BudgetExceeded
from gradmem_lib.course import chain_budget, chain_setting

card, (stack, start) = chain_budget(), chain_setting()
for every in (4, unequal):
    try:
        with MemoryTracker(stack, budget=card, live=False), checkpoint_layers(stack, every):
            stack(start).square().mean().backward()
    except BudgetExceeded as error:
        print(error.snapshot.total - card, "bytes over the card's", card, "with", every)
head = record_schedule(stack[-1:], lambda: stack[-1](start).square().mean().backward())
print("head and loss need", head.peak // start.nbytes - 1, "boundaries beside their input")

# %% [markdown]
# <details><summary>Hint 1: which moments?</summary>
#
# In a layer's backward: *earlier* boundaries, its segment in full, and 9 on their way. At the loss: *all* boundaries,
# and what head and loss need. So use fewer segments than for the layers alone, and longer ones.
#
# <details><summary>Hint 2: which lengths?</summary>
#
# `best_segments(64, internal, 1, temporaries=...)` finds them. Count the head as a layer whose inside is all that head
# and loss need, with nothing on its way.
#
# <details><summary>Hint 3: in code</summary>
#
# `best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0])`, and then `with checkpoint_layers(layers,
# lengths):` around forward. Backward may stand inside or after it.
#
# </details></details></details>


# %%
def train_step(layers, x):
    ### BEGIN SOLUTION
    lengths = best_segments(64, [4] * 63 + [25], 1, temporaries=[9] * 63 + [0])
    with checkpoint_layers(layers, lengths):
        loss = layers(x).square().mean()
        loss.backward()
    return loss.item()
    ### END SOLUTION


train_step = check("4.7", train_step)

# %%
stack, start = chain_setting()
with MemoryTracker(stack, budget=card, title="64 layers and their logits"):
    train_step(stack, start)

# %% [markdown]
# Each tooth almost fills the card.
#
# ## Optional: what it costs
#
# Many texts say "one extra forward, 33 % more work". This assumes that backward costs two forwards: one for the
# gradients of the inputs, one for those of the weights. With frozen weights there is no second one.
# The next cell counts floating-point operations:

# %%
from torch.utils.flop_counter import FlopCounterMode


def work(net, every):
    with checkpoint_layers(net, every), FlopCounterMode(display=False) as counter:
        net(inputs[:8]).square().sum().backward()
    return counter.get_total_flops()


frozen, trained = models.chain(32, width=64), models.chain(32, width=64).requires_grad_()
for every in (1, 4, 32):
    more = [work(net, every) / work(net, [32]) - 1 for net in (trained, frozen)]
    print(f"segments of {every:>2}: trained {more[0]:+.1%}, frozen {more[1]:+.1%}")

# %% [markdown]
# The extra work is up to 33 % where all weights are trained, and up to 50 % where they are frozen.
# <!-- holds: 0.32 < more[0] < 1 / 3 and 0.49 < more[1] < 1 / 2 --> With short segments
# it is *less*: PyTorch stops the second run as soon as the last missing tensor is there, and so spares the last product
# of each segment.
#
# Work is not time. Measure yours.

# %%
claims.show("C20")

# %% [markdown]
# ## Optional: random numbers
#
# What if a layer that runs twice has *dropout*? The next two cells compare the weights' gradients under your checkpoint,
# and under PyTorch's, with those under none.


# %%
def with_dropout():
    torch.manual_seed(0)
    parts = [(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(*(nn.Sequential(*part) for part in parts))


def gradient_of(net, run=lambda layer, x: layer(x)):
    torch.manual_seed(1)
    net.zero_grad()
    forward(run, net, inputs).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


# %%
net = with_dropout()
right = gradient_of(net)
off = (gradient_of(net, Checkpoint.apply) - right).norm() / right.norm()
theirs = gradient_of(net, lambda layer, x: checkpoint(layer, x, use_reentrant=False))
print(f"relative error: yours {off:.1f}, PyTorch's {(theirs - right).norm():.1f}")

# %% [markdown]
# Your second run drops other values, so the gradient is off by a tenth. <!-- holds: f"{off:.1f}" == "0.1" -->
# PyTorch's checkpoint runs again from the random state of the first run, and is exact. The same is true of drop
# path, which leaves out whole branches: lesson 03 measures it. Yours will be exact after exercise 4.2.
#
# ### Exercise 4.2 · the same random numbers twice
#
# ●●○ · 6 minutes · optional · trains: saving the random state, and leaving the rest of the program alone
#
# Write `SafeCheckpoint`, whose second run draws the random numbers of the first. Afterwards the rest of the program must
# go on with *its* random numbers, as if there had been no second run. You may call `Checkpoint.forward(ctx, run, x)`
# and `Checkpoint.backward(ctx, gradient)` for everything else.
#
# <details><summary>Hint 1: the state</summary>
#
# `ctx.state = torch.get_rng_state()`, and later `torch.set_rng_state(ctx.state)`. (A card has a random state of its
# own, which must be kept in the same way.)
#
# <details><summary>Hint 2: the rest of the program</summary>
#
# `with torch.random.fork_rng():` puts the state back at its end, whatever happened inside.
#
# </details></details>


# %%
class SafeCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_04/exercises.py

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_04/exercises.py


SafeCheckpoint = check("4.2", SafeCheckpoint)

# %% [markdown]
# ## Optional: more practice
#
# ### Exercise 4.3 · the gradient that never came
#
# ●○○ · 5 minutes · optional · trains: why a reentrant checkpoint needs an input that requires a gradient
#
# A Function has a node in the graph only if one of its arguments requires a gradient. Write
# `from_frozen(embedding, layers, ids)`: the output of `layers` on `embedding(ids)`, with each layer in a
# **reentrant** checkpoint. All layers must get the gradients of a step without checkpoints, also with dropout, and
# the embedding none.
#
# <details><summary>Hint 1: what is missing</summary>
#
# The weights require a gradient, but a Function sees only its arguments, `run` and `x`. Something about `x` must
# change.
#
# <details><summary>Hint 2: in code</summary>
#
# `x = embedding(ids).requires_grad_()`, and then the loop. In transformers, `model.enable_input_require_grads()` does
# it.
#
# </details></details>


# %%
def from_frozen(embedding, layers, ids):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_04/exercises.py


from_frozen = check("4.3", from_frozen)

# %% [markdown]
# ### Exercise 4.4 · segments
#
# ●●○ · 6 minutes · optional · trains: cutting a list of layers, to its last one
#
# Write `run_in_segments(layers, x, k)` for an `nn.Sequential`: segments of `k` layers in a row, each in a checkpoint
# with `use_reentrant=False`. Where k does not divide the number of layers, the last segment is shorter.
#
# <details><summary>Hint 1: a segment</summary>
#
# A slice of an `nn.Sequential` is an `nn.Sequential` too: `layers[3:6]` can be called.
#
# <details><summary>Hint 2: the loop</summary>
#
# `range(0, len(layers), k)` gives the places where segments start, and a slice may reach past the end.
#
# </details></details>


# %%
def run_in_segments(layers, x, k):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_04/exercises.py


run_in_segments = check("4.4", run_in_segments)
