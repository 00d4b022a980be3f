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
# *60 to 75 minutes. You need: lesson 01, and a rough idea of `torch.autograd.Function` (you will write one).*
#
# Forward stores what backward will need. Most of it could be computed again, from much less. This trade of work for
# memory is called gradient checkpointing. It has a famous rule, a checkpoint every √n layers, and there are several
# places where the rule is wrong. After this lesson you can
#
# - write a checkpoint yourself, and say what PyTorch's own does better;
# - look at a schedule and see which layers are stored, run again and freed, and when;
# - derive the best segment length for *your* layers, and know when √n is not it;
# - go below the peak of every schedule of equal segments, still with one extra forward at most;
# - say before you run it where checkpointing will not help.

# %%
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradmem_lib import (
    MemoryTracker,
    best_segments,
    check,
    checkpoint_layers,
    extra_forwards,
    predict_first,
    uniform_segments,
)
from gradmem_lib.course import claims, models, texts

# %% [markdown]
# ## 1 · What forward could forget
#
# You have a chain of 16 equal layers. For its backward, each layer keeps five times the bytes of its input: the input
# itself, and four times as much inside. The weights are frozen and the *input* is trained, as in prompt tuning. So no
# weight gets a gradient, and you see the activations almost alone.
#
# Two letters serve for the whole lesson. A **boundary** is the tensor that one layer hands to the next, and it has
# **x** bytes. A layer keeps **a** bytes in all, its input included. Here a = 5 x. The next two cells print the size of
# a boundary, and how many of them are alive after forward.

# %%
layers = models.chain(16, width=64, keeps=5)
inputs = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
boundary = inputs.nbytes
print(f"a boundary: {boundary:,} bytes")


# %%
def boundaries(nbytes, net):
    """Bytes beyond the weights, in boundaries."""
    return round((nbytes - sum(p.nbytes for p in net.parameters())) / boundary)


with MemoryTracker(layers, live=False) as tracker:
    out = layers(inputs)
    print("alive after forward:", boundaries(tracker.current.total, layers), "boundaries")

# %% [markdown]
# These are 16 × 5 boundaries, and the output of the last layer. Now suppose that each layer keeps *only* its input.
# When backward reaches a layer, the layer runs forward once more, this time with autograd recording, and backward goes
# on from there.

# %%
question = (
    "16 layers that keep only their inputs: how many boundaries are alive after forward?"
)
guess_a = predict_first("4.a", question, unit="boundaries")

# %% [markdown]
# ### Exercise 4.1 · a checkpoint by hand
#
# ●●○ · 10 minutes · trains: what autograd keeps, and how to run a layer again inside backward
#
# Write the two halves of `Checkpoint`. `Checkpoint.apply(run, x)` shall return `run(x)` and keep only `x`. Its backward
# receives the gradient of the output. It returns one value for each argument of forward: `None` for `run`, and the
# gradient of `x`. The weights inside `run` must get their gradients as well.
#
# <details><summary>Hint 1: forward</summary>
#
# `ctx.save_for_backward(x)` keeps a tensor, and `ctx.run = run` keeps anything else. Inside a Function's `forward`
# autograd is off already, so you need no `torch.no_grad()`.
#
# <details><summary>Hint 2: backward, the second run</summary>
#
# `(x,) = ctx.saved_tensors`. Autograd is off here too, so run the layer under `with torch.enable_grad():`. Start from
# `x.detach().requires_grad_()`. Otherwise backward continues into the layers before this one.
#
# <details><summary>Hint 3: backward, the gradients</summary>
#
# `torch.autograd.backward(out, gradient)` goes through the new graph, and leaves gradients in the weights and in
# `x.grad`.
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
    """All layers, each of them by ``run(layer, x)``."""
    for layer in net:
        x = run(layer, x)
    return x


def plain(layer, x):
    return layer(x)


with MemoryTracker(layers, live=False) as tracker:
    out = forward(Checkpoint.apply, layers, inputs)
    kept = boundaries(tracker.current.total, layers)
guess_a.reveal(formula=16 + 1, measured=kept)

# %% [markdown]
# 16 inputs and one output are alive. Next come two whole steps in one picture: first everything is kept, then each
# layer runs under your checkpoint. Look at the height of the two ramps. What are the teeth that follow the second one?
# (The tracker draws the second ramp as temporaries, because your Function makes its tensors while autograd is off. They
# are activations all the same.)

# %%
del out
with MemoryTracker(layers, title="16 layers: all kept, then your checkpoint") as tracker:
    forward(plain, layers, inputs).square().sum().backward()
    expected, inputs.grad = inputs.grad, None
    half = len(tracker.timeline)
    forward(Checkpoint.apply, layers, inputs).square().sum().backward()

# %%
totals = tracker.timeline.totals
with_checkpoints = max(totals[half:]) - expected.nbytes  # kept only to compare with
print("peak, all kept:  ", boundaries(max(totals[:half]), layers), "boundaries")
print("peak, checkpoint:", boundaries(with_checkpoints, layers), "boundaries")
print("the same gradient, to the bit:", torch.equal(inputs.grad, expected))

# %% [markdown]
# Each tooth is a layer that runs again, is used, and is freed. The peak is 30 boundaries, not 17. It is in the backward
# of the last layer:
#
# - 16 boundaries wait, one for each layer;
# - the last layer has run again, and has its 4 boundaries inside and its output, so 5 more;
# - 9 are gradients on their way through that layer (the largest are those of its wide inside).
#
# **Waiting boundaries, one layer in full, and gradients on their way**: the rest of this lesson follows from this sum.
#
# ## 2 · Random numbers
#
# The next two cells compare the gradients once more, now for layers with trained weights and *dropout*. How far off
# will your checkpoint be?


# %%
def with_dropout(n=8):
    torch.manual_seed(0)
    parts = [[nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)] for _ in range(n)]
    return nn.Sequential(*(nn.Sequential(*part) for part in parts))


def gradient_of(run, net):
    torch.manual_seed(1)
    net.zero_grad()
    forward(run, net, inputs).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


# %%
net = with_dropout()
right, found = gradient_of(plain, net), gradient_of(Checkpoint.apply, net)
print(f"relative error: {(found - right).norm() / right.norm():.1f}")

# %% [markdown]
# The second run draws other random numbers and drops other values. Backward then computes the gradient of a network
# that never ran. It differs from the right gradient by a tenth of that gradient's length, and nothing warns you.
#
# ### Exercise 4.2 · the same random numbers twice
#
# ●●○ · 6 minutes · trains: saving the random state, and leaving the rest of the program alone
#
# Write `SafeCheckpoint`. It notes the state of the random number generator before its first run. In backward it runs
# again from that state. Afterwards the rest of the program must go on with *its* random numbers, as if there had been
# no second run. You may call `Checkpoint.forward(ctx, run, x)` and `Checkpoint.backward(ctx, gradient)` for everything
# else.
#
# <details><summary>Hint 1: the state</summary>
#
# `ctx.state = torch.get_rng_state()`, and later `torch.set_rng_state(ctx.state)`.
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
        ### BEGIN SOLUTION
        ctx.state = torch.get_rng_state()
        return Checkpoint.forward(ctx, run, x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        with torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            return Checkpoint.backward(ctx, gradient)
        ### END SOLUTION


SafeCheckpoint = check("4.2", SafeCheckpoint)

# %%
found = gradient_of(SafeCheckpoint.apply, net)
print("with dropout, the same to the bit:", torch.equal(found, right))
print("the price:", torch.get_rng_state().nbytes, "bytes of random state a call")

# %% [markdown]
# A card has a random state of its own, which must be kept in the same way. The tracker does not see these states.
# Beside a boundary of a real model they are nothing.
#
# ## 3 · PyTorch's own
#
# `torch.utils.checkpoint.checkpoint(run, x, use_reentrant=...)` comes in two kinds:
#
# - With `True` it is an `autograd.Function` like yours, random state included. It calls backward *inside* backward. So
#   it enters autograd's engine a second time, and is called reentrant.
# - With `False` there is no Function. Forward runs with its graph, and a hook drops each tensor that the graph would
#   save. When backward asks for the first of them, the segment runs again.
#
# | | `use_reentrant=True` | `use_reentrant=False` |
# |---|---|---|
# | the input must require a gradient | yes (a warning if not) | no |
# | keyword arguments for `run` | no | yes |
# | `torch.autograd.grad` | no | yes |
# | checkpoints inside checkpoints | yes | yes |
# | under `torch.compile` | yes | yes |
# | the second run | goes to the end | stops when the last missing tensor is there |
# | notices a second run that differs | no | where shapes or dtypes differ |
#
# The first row is a trap. The next cell puts trained layers on a frozen embedding, and counts the layers that get a
# gradient.

# %%
torch.manual_seed(0)
embedding = nn.Embedding(50, 64).requires_grad_(False)
net, ids = with_dropout(), torch.randint(0, 50, (128,))
for reentrant in (False, True):
    net.zero_grad()
    x = embedding(ids)
    with warnings.catch_warnings(record=True) as caught:
        for layer in net:
            x = checkpoint(layer, x, use_reentrant=reentrant)
    head = nn.Linear(64, 1)
    head(x).sum().backward()
    learn = sum(layer[0].weight.grad is not None for layer in net)
    said = {f"\n  warning: {each.message}" for each in caught}
    print(f"use_reentrant={reentrant!s:<6} layers with a gradient: {learn} of 8", *said)

# %% [markdown]
# With the reentrant kind only the head learns, and the loss still falls a little. A warning is all that you get. Your
# Function has the same fault, and not even a warning. Try to say why: what does autograd record for a Function if none
# of its tensors requires a gradient?
#
# ### Exercise 4.3 · the gradient that never came
#
# ●○○ · 5 minutes · trains: why a reentrant checkpoint needs an input that requires a gradient
#
# Write `from_frozen(embedding, layers, ids)`. It returns the output of `layers` on `embedding(ids)`, with each layer in
# a checkpoint of the **reentrant** kind, as older code does it. All layers must learn, and the embedding must not.
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
    ### BEGIN SOLUTION
    x = embedding(ids).requires_grad_()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x
    ### END SOLUTION


from_frozen = check("4.3", from_frozen)

# %%
claims.show("C42")

# %% [markdown]
# From here on we use the kind with `use_reentrant=False`.
#
# ## 4 · Segments
#
# One checkpoint a layer keeps n boundaries. With k layers in one checkpoint, only n / k boundaries are kept. But when
# backward reaches such a **segment**, all its k layers are in memory at once.
#
# ### Exercise 4.4 · segments
#
# ●●○ · 6 minutes · trains: cutting a list of layers, to its last one
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
    ### BEGIN SOLUTION
    for start in range(0, len(layers), k):
        x = checkpoint(layers[start : start + k], x, use_reentrant=False)
    return x
    ### END SOLUTION


run_in_segments = check("4.4", run_in_segments)

# %% [markdown]
# `record_schedule` watches a real step. It notes which layer each operation belongs to, when each block of memory
# appears, and when it goes. In its picture, layers go from bottom to top and time goes from left to right. First come
# nine layers without checkpoints:

# %%
from gradmem_lib import explore_schedule, record_schedule, show_schedule

nine = models.chain(9, width=64, keeps=5)
everything = record_schedule(nine, lambda: nine(inputs).square().sum().backward())
show_schedule(everything, title="9 layers, all kept")

# %% [markdown]
# The stored bytes form a triangle: the first layer's are stored longest. Forward fills the triangle, and backward
# empties it from the top. The next cell runs your segments of three:

# %%
threes = record_schedule(
    nine, lambda: run_in_segments(nine, inputs, 3).square().sum().backward()
)
show_schedule(threes, title="9 layers in segments of 3, by your function")
print("layers run again:", [layer + 1 for layer in threes.ran("recompute")])

# %% [markdown]
# The three thin lines are the boundaries, which wait for their turn. Then the same happens three times: a segment runs
# forward again, is in memory in full (a small triangle), and is freed by backward. The last segment has only just run
# when backward begins. It runs again all the same.
#
# Now change the schedule yourself. Each picture is a real run. Before you move a control, say what will happen:
#
# - Segment length from 1 to n: where do you expect the lowest peak?
# - Layers that keep more (a/x): does the best length grow or shrink?
# - "Best segments": what do you notice about their lengths?

# %%
explore_schedule()

# %% [markdown]
# ## 5 · √n, where it is right
#
# One formula gives the peak of all these chains, and of a chain of a thousand layers. You have seen the parts that it
# adds up.
#
# ### Exercise 4.5 · the peak of a schedule
#
# ●●○ · 5 minutes · trains: finding the segment whose backward needs the most
#
# Write `kept_at_peak(lengths, a, x)`: the most bytes that are kept at any one time. `lengths` are the lengths of the
# segments, first segment first. A layer keeps `a` bytes, of which `x` are its input. Do not count the gradients on
# their way.
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
# a**. The first term falls with k, and the second one grows. Take a chain of 64 layers that keep only their input: a =
# x.

# %%
question = "64 layers with a = x: which segment length has the lowest peak?"
guess_b = predict_first("4.b", question, unit="layers")


# %%
def measured_peak(net, x, every=None):
    """Bytes at the peak of a step beyond the weights, with ``checkpoint_layers(net, every)``."""
    handle = None if every is None else checkpoint_layers(net, every)
    with MemoryTracker(net, live=False) as tracker:
        net(x).abs().sum().backward()
    if handle is not None:
        handle.remove()
    return tracker.peak.total - sum(p.nbytes for p in net.parameters())


# %%
equal = models.chain(64, width=64, keeps=1)
on_their_way = 3 * boundary + 8  # gradients; and the loss and its gradient, 4 bytes each
peaks = {}
print(f"{'k':>3}{'your formula':>15}{'measured':>13}")
for k in (1, 2, 3, 4, 6, 8, 10, 12, 16, 32, 64):
    formula = kept_at_peak(uniform_segments(64, k), boundary, boundary) + on_their_way
    peaks[k] = measured_peak(equal, inputs, k)
    print(f"{k:>3}{formula:>15,}{peaks[k]:>13,}  " + "█" * round(peaks[k] / boundary))

lowest = [k for k in peaks if peaks[k] == min(peaks.values())]
print("lowest at k =", *lowest)
guess_b.reveal(formula=64**0.5, measured=lowest[len(lowest) // 2])

# %% [markdown]
# The bars draw a U, and your formula is right to the byte. The bottom of the U is flat, around √64. (Segments of 6 and
# of 10 leave a short last segment, so they need no more than segments of 8.) Now you can judge a popular sentence, half
# by half. *More checkpoints, more memory* holds only on the left arm, where segments are shorter than the best. *More
# checkpoints, less recomputation* hardly holds at all: every layer runs once more, whatever k is.

# %%
claims.show("C26", "C27", "C19")

# %% [markdown]
# Look at the last row, k = 64. It is one checkpoint around the whole model, which tutorials show as the simple way.

# %%
question = (
    "The whole model in one checkpoint, a = 5 x, 16 layers: by how much does the peak fall?"
)
guess_c = predict_first("4.c", question, unit="percent")

# %%
with MemoryTracker(layers, title="one checkpoint around the whole model") as tracker:
    out = checkpoint(layers, inputs, use_reentrant=False)
    print("after forward:", boundaries(tracker.current.total, layers), "boundaries")
    loss = out.square().sum()
    del out
    loss.backward()

after = boundaries(tracker.peak.total, layers)
before = round(measured_peak(layers, inputs) / boundary)
print(f"at the peak: {after} boundaries; without a checkpoint: {before}")
guess_c.reveal(measured=round(100 * (1 - after / before)))

# %% [markdown]
# After forward, two boundaries are left and the checkpoint looks perfect. Then backward asks for the last layer, and
# everything comes back at once. **A checkpoint saves at the peak what is not in the segment that runs again.** Do not
# measure after forward: it shows a saving that the peak does not have.

# %%
claims.show("C21", "C28", "C40", "C50")

# %% [markdown]
# ## 6 · A real Transformer
#
# Section 5's chain was made for the rule: a layer kept its input and no more. If a layer keeps more, a segment costs
# more and a boundary costs the same. Where is the bottom of the U then?
#
# ### Exercise 4.6 · the best segment length
#
# ●●○ · 6 minutes · trains: deriving the rule, and knowing when the root of n is not it
#
# Write `best_length(n, a, x)`: the whole number k from 1 to n for which `uniform_segments(n, k)` has the lowest peak.
#
# <details><summary>Hint 1: by calculus</summary>
#
# n/k · x + k · a is lowest where its two terms are equal.
#
# <details><summary>Hint 2: solved for k</summary>
#
# k = √(n · x / a). Round it, and mind that k is at least 1 and at most n.
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
# How large is a, in boundaries, for layers that people train? The closed forms of lesson 01 tell you. The next two
# cells compare no checkpoint, √n and your `best_length` for four models:

# %%
from gradmem_lib import accounting


def a_and_x(shape, seq_len=1024, precision="bf16"):
    """Bytes that one block keeps, its input included, and bytes of its input."""
    block = accounting.block_activations(shape, 1, seq_len, precision=precision)
    number = accounting.PRECISIONS[precision].residual
    return sum(block.values()), number * seq_len * shape.hidden


gpt3 = accounting.Shape(
    "GPT-3", 50257, 12288, 96, 96, 96, 49152, gated=False, norm="layer", biases=True
)
names = ("SmolLM2-135M", "Llama-2-7B", "Llama-2-70B")
shapes = [*(accounting.SHAPES[name] for name in names), gpt3]

# %%
print("bf16, 1 × 1024 tokens      a/x   √n  best k     none    √n   best k  (GiB)")
for shape in shapes:
    a, x = a_and_x(shape)
    n, k = shape.layers, best_length(shape.layers, a, x)
    root = round(n**0.5)
    sizes = [n * a] + [kept_at_peak(uniform_segments(n, m), a, x) for m in (root, k)]
    row = "".join(f"{nbytes / 2**30:>8.2f}" for nbytes in sizes)
    print(f"{shape.name:<14}{n:>3} layers {a / x:>8.1f}{root:>5}{k:>8} {row}")

# %% [markdown]
# A block keeps twenty to thirty times its input. √(n · x / a) is then close to 1, for 30 layers and for 96. **One
# checkpoint a layer**, which transformers uses by default, is not a crude version of √n. For Transformers it is
# (nearly) the optimum, and √n needs two to three times as much. The rule of √n belongs to chains of layers that keep
# little.
#
# Closed forms are not a measurement. So take SmolLM2's 30 blocks with real weights and text. The blocks are frozen, and
# their input is trained.

# %%
smol, tokenizer = models.smollm2()
smol.requires_grad_(False)
ids = texts.batch(tokenizer, batch_size=1, seq_len=64)


def smol_peak(loss=False):
    """The peak of a step beyond the weights, in boundaries: the blocks alone, or with the loss."""
    embeds = smol.model.embed_tokens(ids).detach().requires_grad_()
    with MemoryTracker(smol, live=False) as tracker:
        before = tracker.current.total
        if loss:
            smol(inputs_embeds=embeds, labels=ids).loss.backward()
        else:
            smol.model(inputs_embeds=embeds).last_hidden_state.square().sum().backward()
    return round((tracker.peak.total - before) / embeds.nbytes, 1)


# %%
question = "SmolLM2, 30 frozen blocks: which equal segments have the lowest peak?"
guess_d = predict_first("4.d", question, unit="layers")

# %%
with checkpoint_layers(smol, "best") as handle:
    smol_peak()  # the first step measures each layer, and chooses
    best_of_smol = smol_peak()
a, x = handle.internal[0] + handle.boundary[0], handle.boundary[0]
print(f"measured a/x: {a / x:.2f}")
print("chosen segments:", *handle.segments)
print(f"peak with them: {best_of_smol} boundaries")

# %%
found = {}
for k in (1, 2, 5):
    with checkpoint_layers(smol, k):
        found[k] = smol_peak()
    print(f"segments of {k}: {found[k]:>6} boundaries")
print("no checkpoint:", f"{smol_peak():>7} boundaries")
guess_d.reveal(formula=round((30 * x / a) ** 0.5, 2), measured=min(found, key=found.get))

# %% [markdown]
# A frozen matrix does not need its input, because it gets no gradient. So a is smaller than in the table above, and
# pairs of layers are a little better than single ones. √30 ≈ 5 is far off. The rule held, with the a that is really
# there: **measure a, do not look it up.** `every="best"` does that. Its first step costs two more forwards and a
# backward.
#
# Transformers has an option `every_n_layers=k`. It sounds like segments of k layers. The next two cells compare:

# %%
llama = models.tiny_llama(layers=32, hidden=64, heads=4, intermediate=172, vocab=256)
tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))


def most_activations():
    with MemoryTracker(llama, live=False) as tracker:
        llama(input_ids=tokens, labels=tokens).loss.backward()
    llama.zero_grad()
    return max(tracker.timeline.by_category["activations"])


# %%
print(f"no checkpoint:       {most_activations():>12,} bytes of activations")
llama.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=6)
print(f"every_n_layers=6:    {most_activations():>12,}")
llama.activation_checkpointing_disable()
for k in (6, 1):
    with checkpoint_layers(llama, every=k):
        print(f"segments of {k}:       {most_activations():>12,}")

# %% [markdown]
# It is not the same. `every_n_layers=6` checkpoints one layer in six and *keeps the other five*. It is a dial between
# no checkpoint and one a layer, for those who have bytes to spare. (The option came with transformers 5.16, and so did
# `offload=True`, which keeps the boundaries in the CPU's memory. Before 5.23 the methods are called
# `gradient_checkpointing_enable` and `gradient_checkpointing_disable`.)
#
# ## 7 · Beyond √n: long segments first
#
# Look at your formula again: earlier boundaries, and one whole segment. The *first* segment runs again last, when all
# other boundaries are gone. The last segment runs again first, when all boundaries are still there. So why should the
# two be equally long?
#
# Fix a limit P for the peak, and fill it. The first segment may have P/a layers. Each segment after it finds one
# boundary more, and must be x/a layers shorter, until nothing is left. So the lengths fall in a straight line from P/a
# to 0, over P/x segments. The sum of the lengths is the area of this triangle, and it is the number of layers: n = P² /
# (2 · a · x). So **P = √(2 · a · x · n)**. Equal segments need 2 · √(a · x · n), which is √2 times as much: you save 29
# %.
#
# `best_segments` finds the exact optimum in whole layers. The next cell prints the lengths for 64 layers, and compares
# the peaks of equal and unequal segments:

# %%
lengths = best_segments(64, internal=4, boundary=1)  # internal: a without the input
print(*lengths)
print("\na = 5 x       best equal   unequal   ratio   √(2·a·x·n)")
for n in (16, 64, 256, 1024):
    equal_ones = min(kept_at_peak(uniform_segments(n, k), 5, 1) for k in range(1, n + 1))
    unequal = kept_at_peak(best_segments(n, 4, 1), 5, 1)
    row = (
        f"{equal_ones:>10}{unequal:>10}{unequal / equal_ones:>8.2f}{(10 * n) ** 0.5:>13.1f}"
    )
    print(f"{n:>5} layers {row}")

# %% [markdown]
# The ratio falls towards 1 / √2 ≈ 0.71 as the chain gets longer. In the next picture, the waiting boundaries climb like
# a staircase, and the triangles beside them get smaller:

# %%
sixteen = models.chain(16, width=64, keeps=5)
with checkpoint_layers(sixteen, every=best_segments(16, 4, 1)) as handle:
    unequal = record_schedule(sixteen, lambda: sixteen(inputs).square().sum().backward())
show_schedule(unequal, title=f"16 layers in segments of {handle.segments}")

# %% [markdown]
# The last segment is *not* run again. Its backward begins at once, so dropping it would save nothing at the peak and
# cost its forward. `checkpoint_layers` keeps the last segment of a list. With an int k it runs all segments again, as
# textbooks do.
#
# And if *two* extra forwards are allowed? Then a segment that runs again may have checkpoints of its own: a list inside
# the list. The next two cells measure all these ways on 64 layers with a = 5 x. They count how often a layer is called
# beyond the 64 calls of a forward:

# %%
deep = models.chain(64, width=64, keeps=5)
ways = {
    "one a layer": uniform_segments(64, 1),
    "√n: segments of 8": uniform_segments(64, 8),
    "best equal: segments of 4": uniform_segments(64, 4),
    "best segments": best_segments(64, 4, 1),
    "... two extra forwards": best_segments(64, 4, 1, max_extra_forward=2.0),
}

# %%
peak = measured_peak(deep, inputs) / boundary
print(f"{'no checkpoint':<26}{peak:>5.0f} boundaries{'':>17}" + "▇" * round(peak / 10))
for name, segments in ways.items():
    peak, extra = measured_peak(deep, inputs, segments) / boundary, extra_forwards(segments)
    row = f"{name:<26}{peak:>5.0f} boundaries, {extra:>3} more calls "
    print(row + "▇" * round(peak / 10))

# %% [markdown]
# The same layers need 329 boundaries without checkpoints, 36 with the best segments, and 22 with two extra forwards.
# Nine boundaries in each line are gradients on their way. The best segments are not quite free: they need 63 more calls
# where equal ones need 60 or 56. The last segment is the only one that does not run again, and theirs is the shortest.
#
# With ever more levels of lists, memory grows only like log n. The number of forwards grows in the same way, so few
# people go further.
#
# ### Exercise 4.7 · 64 layers on a card that the root of n exceeds
#
# ●●● · 10 minutes · trains: choosing segments of unequal length under a budget of bytes and of forward calls
#
# Write `train_step(layers, x)`: forward and backward of `layers(x).square().mean()`, returning the loss as a float. Its
# peak must be at most the bytes printed below. There are 64 layers with a = 5 x. Each may run forward **twice** at
# most.

# %%
from gradmem_lib import BudgetExceeded
from gradmem_lib.course import chain_budget, chain_setting

card = chain_budget()
print(f"the card for this exercise: {card:,} bytes")
for k in (1, 8, 4):
    chain, start = chain_setting()
    try:
        with MemoryTracker(chain, budget=card, live=False), checkpoint_layers(chain, k):
            chain(start).square().mean().backward()
    except BudgetExceeded as error:
        over = error.snapshot.total - card
        print(f"segments of {k}: stopped, {over:,} bytes over the budget")

# %% [markdown]
# <details><summary>Hint 1: which lengths?</summary>
#
# Take long segments first. `best_segments(n, internal, boundary)` gives them. `internal` is a without the input.
#
# <details><summary>Hint 2: how to run them</summary>
#
# `with checkpoint_layers(layers, lengths):` around forward *and* backward. Or a loop with `checkpoint`, as in 4.4.
#
# <details><summary>Hint 3: both</summary>
#
# `best_segments(64, internal=4, boundary=1)`. Only the ratio of the two matters.
#
# </details></details></details>


# %%
def train_step(layers, x):
    ### BEGIN SOLUTION
    lengths = best_segments(len(layers), internal=4, boundary=1)
    with checkpoint_layers(layers, lengths):
        loss = layers(x).square().mean()
        loss.backward()
    return loss.item()
    ### END SOLUTION


train_step = check("4.7", train_step)

# %%
chain, start = chain_setting()
with MemoryTracker(chain, budget=card, title="64 layers, long segments first") as tracker:
    loss = train_step(chain, start)
print(f"loss {loss:.3f}, peak {tracker.peak.total:,} of {card:,} bytes")

# %% [markdown]
# ## 8 · What it costs
#
# You often read "one extra forward, 33 % more work". The 33 % assume that backward costs two forwards: one for the
# gradients of the inputs, one for those of the weights. With frozen weights (LoRA, a tuned prompt) there is no second
# one.

# %%
question = (
    "Frozen weights, every layer run again: how many per cent more floating-point work?"
)
guess_e = predict_first("4.e", question, unit="percent")

# %%
from torch.utils.flop_counter import FlopCounterMode


def work(net, every=None):
    handle = None if every is None else checkpoint_layers(net, every)
    with FlopCounterMode(display=False) as counter:
        net(inputs[:8]).square().sum().backward()
    if handle is not None:
        handle.remove()
    return counter.get_total_flops()


lengths = best_segments(32, 4, 1)

# %%
trained, frozen = models.chain(32, width=64), models.chain(32, width=64)
trained.requires_grad_(True)
more = {}
print("segments      trained   frozen")
for name, every in {"1": 1, "4": 4, "8": 8, "one of 32": 32, "unequal": lengths}.items():
    row = [100 * (work(net, every) / work(net) - 1) for net in (trained, frozen)]
    more[name] = row[1]
    print(f"{name:<12}" + "".join(f"{percent:>8.1f}%" for percent in row))
guess_e.reveal(formula=50, measured=round(more["one of 32"]))

# %% [markdown]
# The extra work is up to 33 % where all weights are trained, and up to 50 % where they are frozen. With short segments
# it is *less*: PyTorch stops the second run as soon as the last missing tensor is there, and so spares the last product
# of each segment. One layer a segment spares it in every layer. Your own `Checkpoint` runs to the end.
#
# There is a middle between keeping all of a layer and dropping all of it. **Selective** checkpointing keeps the results
# of the matrix products, which cost much work. It computes the cheap rest again: norms, activation functions, sums.
# PyTorch's own trainer for large models, torchtitan, does so by default. The next two cells checkpoint all of each
# layer, then selectively, then nothing:

# %%
from functools import partial

from torch.utils.checkpoint import create_selective_checkpoint_contexts

aten = torch.ops.aten
costly = [aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
keep_costly = partial(create_selective_checkpoint_contexts, costly)


def llama_work(net):
    with FlopCounterMode(display=False) as counter:
        net(input_ids=tokens, labels=tokens).loss.backward()
    net.zero_grad()
    return counter.get_total_flops()


# %%
before = llama_work(llama)
for name, option in {"all of it": {}, "selective": {"context_fn": keep_costly}}.items():
    llama.activation_checkpointing_enable({"use_reentrant": False} | option)
    kept, more_work = most_activations(), 100 * (llama_work(llama) / before - 1)
    print(f"{name:<11}{kept:>12,} bytes of activations, work {more_work:+.1f} %")
    llama.activation_checkpointing_disable()
print(f"nothing    {most_activations():>12,}")

# %% [markdown]
# Four tenths of the bytes are freed, and no matrix product runs twice. The counter has a gap, though: `FlopCounterMode`
# does not count the CPU's fused attention. That attention is kept here you know from the list, not from the 0.0 %. (The
# list names CPU kernels. On a card attention has other names.)
#
# Work is not time. A second run also reads and writes memory again, and a card that waits for data anyway may hide it.
# The last entry below quotes the times that `benchmarks/checkpointing.py` recorded on one machine. Measure on yours
# before you quote a figure.

# %%
claims.show("C20", "C39", "C41", "C15")

# %% [markdown]
# ## 9 · Where it does not help
#
# Take SmolLM2 again, and now fine-tune **all** of it, on 64 tokens. With 30 layers under checkpoints most activations
# go. How much lower is the peak of forward and backward?

# %%
question = (
    "SmolLM2, all parameters trained, 64 tokens, a checkpoint a layer: the peak falls by?"
)
guess_f = predict_first("4.f", question, unit="percent")

# %%
smol.requires_grad_(True)
full = {}
for every in (None, 1):
    with MemoryTracker(smol, live=False) as tracker:
        handle = None if every is None else checkpoint_layers(smol, every)
        smol(input_ids=ids, labels=ids).loss.backward()
    full[every] = tracker.peak.total
    name = "no checkpoint" if every is None else "one a layer"
    saved = max(tracker.timeline.by_category["activations"])
    print(f"{name:<14}{saved:>12,} of activations, peak {tracker.peak.total:>13,}")
    smol.zero_grad()
handle.remove()
guess_f.reveal(measured=round(100 * (1 - full[1] / full[None])))

# %% [markdown]
# Not at all, although the activations fell to about a quarter. While backward frees activations, gradients grow by 4
# bytes a parameter. With few tokens the *end* of backward is the highest point, and no activation is left there to
# save. The optimizer's step keeps that height. The next picture shows it for a tiny Llama, in two pairs of steps: first
# with 8 tokens, then with 256, each without and then with a checkpoint a layer.

# %%
small = models.tiny_llama(layers=12, hidden=64, heads=4, intermediate=172, vocab=256)
optimizer = torch.optim.AdamW(small.parameters(), foreach=False)


def update(tokens):
    small(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


few, many = tokens[:1, :8], tokens
update(few)
with MemoryTracker(small, optimizer, title="8 tokens, then 256: without, with") as tracker:
    for batch in (few, many):
        update(batch)
        with checkpoint_layers(small, every=1):
            update(batch)

# %% [markdown]
# In the first pair there is nothing to see. In the second pair the checkpoints remove most of the activations, and the
# peak falls with them. So ask where the peak is (`tracker.peak.phase`) before you choose a technique. In three more
# places the rules above do not hold as they stand:
#
# - **Shallow networks.** The last segment is always there in full. With 4 layers that is a quarter of all.
# - **Frozen layers below the first trained one.** They keep nothing anyway, because no gradient goes there.
# - **The loss of a small model with a large vocabulary.** SmolLM2's logits are 85 times as wide as a boundary (lesson
#   01). When the loss is computed all boundaries wait, and no segment is there in full. So fewer, longer segments win.
#
# The next cell measures the last two:

# %%
smol.requires_grad_(False)
for every in (1, "best", 5):
    with checkpoint_layers(smol, every):
        smol_peak(loss=True)  # "best" measures the layers in its first step
        peak = smol_peak(loss=True)
    print(f"SmolLM2 and its loss, every={every!s:<4}: {peak:>6} boundaries")

top = models.chain(16, width=64, keeps=5)
top[14:].requires_grad_(True)  # the last two layers are trained, and the input is not
for every in (None, 1):
    peak = measured_peak(top, inputs.detach(), every)
    print(f"2 trained layers of 16, every={every!s:<4}: {peak / boundary:>5.1f} boundaries")

# %% [markdown]
# With its loss, SmolLM2 prefers segments of five, the opposite of section 6. `"best"` looks only at the layers. It is
# never above one a layer, but it is not the lowest here. And of the 16 layers only the two trained ones ever kept much.
#
# Frozen layers can even become expensive. transformers' `activation_checkpointing_enable` makes the *input* require a
# gradient, so that no checkpoint falls into the trap of section 3. Backward then goes through the frozen layers as
# well. The next cell counts the work of a tiny Llama that trains the last 4 of its 32 layers:

# %%
tuned = models.tiny_llama(layers=32, hidden=64, heads=4, intermediate=172, vocab=256)
tuned.requires_grad_(False)
tuned.model.layers[28:].requires_grad_(True)
before = llama_work(tuned)
tuned.activation_checkpointing_enable()
print(f"checkpoints on:                {llama_work(tuned) / before:.2f} times the work")
tuned.activation_checkpointing_disable()
print(f"off again:                     {llama_work(tuned) / before:.2f}")
tuned.disable_input_require_grads()
print(f"no gradient for the input:     {llama_work(tuned) / before:.2f}")
with checkpoint_layers(tuned.model.layers[28:], every=1):
    print(f"only the last 4 checkpointed:  {llama_work(tuned) / before:.2f}")

# %% [markdown]
# The input's gradient costs far more than the checkpoints, and it stays when they are switched off. If the first layers
# are frozen, call `disable_input_require_grads()`, or give `checkpoint_layers` only the trained layers.
#
# ## 10 · Is it still the same training?
#
# A layer that runs twice must not change the training. The next cell shows that the gradient is the same to the last
# bit, for every schedule:

# %%
net = with_dropout(12)
torch.manual_seed(1)
right = gradient_of(plain, net)
for every in ("sqrt", "best", 1, 5, [6, 3, 2, 1], [[4, 2], [2, 1], 2, 1]):
    with checkpoint_layers(net, every):
        torch.manual_seed(1)
        net.zero_grad()
        net(inputs).square().sum().backward()
    found = torch.cat([p.grad.flatten() for p in net.parameters()])
    print(f"{every!s:<26} the same to the bit: {torch.equal(found, right)}")

# %% [markdown]
# Five things do need your attention:
#
# **Batch norm** updates its running statistics whenever it runs in training mode, so twice. The gradient is right. The
# statistics move further than they should, as if the momentum were larger.

# %%
for use in (False, True):
    norm = nn.BatchNorm1d(64)
    block = nn.Sequential(nn.Linear(64, 64), norm, nn.ReLU())
    out = checkpoint(block, inputs, use_reentrant=False) if use else block(inputs)
    out.sum().backward()
    print(f"checkpoint: {use!s:<6} batches that it has counted: {norm.num_batches_tracked}")

# %% [markdown]
# **Autocast.** Backward runs outside your `with torch.autocast`. PyTorch's checkpoint switches autocast on again for
# the second run. Yours does not, so its layers suddenly compute in another precision:


# %%
def in_bf16(run):
    try:
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(run, with_dropout(2), inputs)
        out.float().square().sum().backward()
        return "fine"
    except RuntimeError as error:
        return str(error)


print("yours:    ", in_bf16(SafeCheckpoint.apply))
print("PyTorch's:", in_bf16(lambda layer, x: checkpoint(layer, x, use_reentrant=False)))

# %% [markdown]
# **A second run that differs.** Some code counts its calls, reads a clock, or drops tokens by random numbers that are
# not torch's. PyTorch compares the *shapes and dtypes* of what the second run saves with those of the first. It does
# not compare values.


# %%
class Fickle(nn.Module):
    """Does something else on each call."""

    def __init__(self, by_shape):
        super().__init__()
        self.by_shape, self.turn = by_shape, 0

    def forward(self, x):
        self.turn += 1
        return (x[: 8 * self.turn] if self.by_shape else x * self.turn).square()


for by_shape in (True, False):
    try:
        checkpoint(Fickle(by_shape), inputs, use_reentrant=False).sum().backward()
        print("other values: no complaint, and a wrong gradient")
    except torch.utils.checkpoint.CheckpointError:
        print("other shapes: CheckpointError")

# %% [markdown]
# **Keyword arguments.** A Hugging Face layer takes its mask and positions by name. Reentrant checkpoints take no names,
# so older code wraps the layer in a `functools.partial`. The other kind, and `checkpoint_layers`, pass names on.
#
# **What layers share.** All layers of a model receive the *same* mask and the same tables of position angles (rotary
# embeddings). These wait for the second run as well, and must be counted once, not once a layer. With eager attention
# the mask is a square:

# %%
eager = models.tiny_llama(layers=16, hidden=64, heads=4, vocab=256, attention="eager")
for every in (None, 1, 4):
    handle = None if every is None else checkpoint_layers(eager, every)
    with MemoryTracker(eager, live=False) as tracker:
        before = tracker.current.total
        out = eager.model(input_ids=tokens).last_hidden_state
        print(
            f"every={every!s:<5} alive after forward: {tracker.current.total - before:>10,} bytes"
        )
    if handle is not None:
        handle.remove()

# %% [markdown]
# The mask has as many bytes as a boundary here. If it were kept for each layer, the last line could not be so small.

# %%
claims.show("C30")

# %% [markdown]
# ## 11 · What you can now do
#
# - **A checkpoint keeps a boundary** and runs its segment again: same random numbers, same precision, same gradient to
#   the bit.
# - **The peak is earlier boundaries and one whole segment.** One checkpoint around the whole model saves nothing.
# - **k = √(n · x / a).** √n is right where a ≈ x. Transformers have a ≈ 20 x or more: one layer a segment, or two.
# - **Long segments first**: √(2·a·x·n) instead of 2·√(a·x·n), for the same one extra forward.
# - **One extra forward** at most: up to 33 % more work with trained weights, up to 50 % with frozen ones, often less.
# - **Look where the peak is first.** Full fine-tuning on few tokens peaks on gradients and the optimizer's states.
#
# `with checkpoint_layers(model, every="best"):` measures a and x for you, and never peaks higher than one checkpoint a
# layer. If the vocabulary is large, try a few longer segments as well, as in section 9. Lesson 05 puts the techniques
# of all lessons together, and asks which of them your card needs.
