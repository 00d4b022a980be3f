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
# # 01 · Memory accounting
#
# *45 to 60 minutes. You need: a PyTorch training loop you could write yourself, and lesson 00.*
#
# "CUDA out of memory" is a sum that came out too large. Before any technique can help, you have to know the terms of
# that sum. After this lesson you can
#
# - name the four residents of training memory, and give their bytes for any model;
# - say *when* in a step the peak comes, and why it moves;
# - list what autograd keeps from a Transformer block, tensor by tensor, and predict it to the byte;
# - tell four precision recipes apart by what they really cost.
#
# Every number here is counted on your machine, with or without a GPU. Where a box asks for a guess, commit to one
# before you run the next cell. You will remember best the numbers that you guessed wrong.

# %%
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gradmem_lib import MemoryTracker, accounting, check, format_bytes, predict_first
from gradmem_lib.course import claims, models, texts

# %% [markdown]
# ## 1 · The four residents
#
# A training step holds four kinds of long-lived bytes:
#
# | resident | what it is | when it lives |
# |---|---|---|
# | **parameters** | the weights | always |
# | **gradients** | one number for every trained weight | from backward to `zero_grad` |
# | **optimizer states** | Adam: two moving averages for every trained weight | from the first `step()` on |
# | **activations** | what forward saves because backward needs it | from forward to backward |
#
# Everything else is **temporary**: made by one operation, gone a few operations later. It still counts at the peak.
#
# We start with a model so small that you can add up every byte: a Llama with 4 blocks. `foreach=False` makes AdamW
# update one parameter after the other.

# %%
model = models.tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
ids = torch.randint(0, 8192, (2, 128), generator=torch.Generator().manual_seed(0))

n = sum(p.numel() for p in model.parameters())
print(f"{n:,} parameters, {model.dtype}, in {len(list(model.parameters()))} tensors")

# %%
guess_a = predict_first(
    "1.a",
    "Parameters, gradients and AdamW's states of this model together: how many bytes?",
)

# %% [markdown]
# Here is the step that the whole course is about. It has four lines, and you will come to know each by its bytes.


# %%
def step(model, optimizer, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


with MemoryTracker(
    model, optimizer, title="the first two steps of a tiny Llama"
) as tracker:
    step(model, optimizer, ids)
    step(model, optimizer, ids)

# %% [markdown]
# Look at the picture from left to right. The parameters are there from the start. Activations pile up in forward. In
# backward they go, while gradients grow in their place. The optimizer's states appear *inside* the first `step()` and
# never leave. So the second step starts from a higher floor than the first: **a run that survives its first step can
# still fail in its second.**

# %%
lines = tracker.timeline.by_category
residents = {name: max(lines[name]) for name in ("parameters", "gradients", "optimizer")}
for name, nbytes in residents.items():
    print(f"{name:<11}{nbytes:>12,} bytes = {nbytes / n:.4f} per parameter")
guess_a.reveal(formula=16 * n, measured=sum(residents.values()))

# %% [markdown]
# These are sixteen bytes a parameter: 4 for the weight, 4 for its gradient, 8 for Adam's two moments. The formula
# misses a few bytes, because AdamW also keeps a *step counter*, one float32 number for each parameter tensor. That is
# little, but this course does not round away what it can count.
#
# ### Exercise 1.1 · the bytes that stay
#
# ●○○ · 6 minutes · trains: adding up parameters, gradients and AdamW's states
#
# Write `resident_bytes(model)`. It returns a dict with the bytes of `"parameters"`, `"gradients"` and `"optimizer"` for
# a model that trains with AdamW. The model may have any dtype, frozen parameters and tied weights (one tensor under two
# names). You need not run anything: shapes and dtypes tell all of it.
#
# <details><summary>Hint 1: where to begin</summary>
#
# `model.parameters()` gives every parameter once, a tied one too. A parameter `p` takes
# `p.numel() * p.element_size()` bytes.
#
# <details><summary>Hint 2: who has a gradient</summary>
#
# Only parameters with `p.requires_grad`. Adam keeps states for the same parameters, in the same dtype.
#
# <details><summary>Hint 3: the last few bytes</summary>
#
# AdamW keeps two moments as large as the gradient, and one float32 step counter for each trained tensor: 4 bytes,
# however large the tensor.
#
# </details></details></details>


# %%
def resident_bytes(model):
    ### BEGIN SOLUTION
    size = {p: p.numel() * p.element_size() for p in model.parameters()}
    trained = [p for p in size if p.requires_grad]
    gradients = sum(size[p] for p in trained)
    optimizer = 2 * gradients + 4 * len(trained)
    return {
        "parameters": sum(size.values()),
        "gradients": gradients,
        "optimizer": optimizer,
    }
    ### END SOLUTION


resident_bytes = check("1.1", resident_bytes)

# %%
print(resident_bytes(model) == residents, resident_bytes(model))

# %% [markdown]
# Your function and the tracker agree to the byte, and neither knows of the other. With it you can settle two claims of
# our source documents. (Every claim in this course has a number. `LEDGER.md` lists them all, with every figure found.)

# %%
claims.show("C02", "C03")

# %% [markdown]
# ## 2 · The life of a step: where is the peak?
#
# Residents are the floor. A run fails at its *peak*, and the peak is one moment. Which one? Now take a real model:
# SmolLM2-135M, pretrained, on real text (the Python language reference). The first load unpacks the weights and can
# take a minute. After that it is quick.

# %%
smol, tokenizer = models.smollm2()
smol_optimizer = torch.optim.AdamW(smol.parameters(), lr=1e-5, foreach=False)
smol_ids = texts.batch(tokenizer, batch_size=2, seq_len=128)

print(f"{sum(p.numel() for p in smol.parameters()):,} parameters, {smol.dtype}")
print(repr(tokenizer.decode(smol_ids[0, :24])))

# %%
guess_b = predict_first(
    "1.b", "The peak of a training step of SmolLM2 in float32 with AdamW, 2 × 128 tokens?"
)

# %% [markdown]
# Watch the plot while this runs. Where is the highest point, and what is it made of?

# %%
with MemoryTracker(
    smol, smol_optimizer, title="SmolLM2-135M, two training steps"
) as tracker:
    for _ in range(2):
        step(smol, smol_optimizer, smol_ids)

# %%
shape = accounting.SHAPES["SmolLM2-135M"]
estimate = accounting.estimate(shape, batch_size=2, seq_len=128, precision="float32")
guess_b.reveal(formula=estimate.total, measured=tracker.peak.total)
for phase in ("forward", "backward", "optimizer_step"):
    print(f"  most in {phase:<15}{tracker.peak_by_phase[phase]:>15,} bytes")
print("the formula expects the peak at:", estimate.moment)
print("the output layer's weight:", format_bytes(smol.lm_head.weight.nbytes))

# %% [markdown]
# Did you expect the peak where the activations are highest? So did we. With so few tokens they are the small part, and
# backward and the optimizer's step are almost level. Three moments compete for the peak:
#
# 1. **the loss**: when backward begins, all activations are alive and the logits (the scores of all words) are at their
#    widest;
# 2. **the end of backward**: activations are gone, gradients are complete, and the last operation, the embedding's
#    gradient, makes a table as large as the embedding itself;
# 3. **the optimizer's step**: all gradients are there, and Adam's arithmetic needs room for its largest tensor.
#
# A band of temporaries, 108 MiB high like the output layer's weight, lies under the whole of backward. It is the
# gradient of the output layer. In SmolLM2 this layer *is* the embedding table, so its gradient waits for the
# embedding's, and the two are added at the end.
#
# Which moment wins depends on how many tokens you feed. The tiny Llama shows it:

# %%
print("    tokens   peak in                 bytes of which activations")
for batch, seq_len in [(1, 16), (2, 64), (2, 128), (8, 128), (8, 256)]:
    tokens = torch.randint(0, 8192, (batch, seq_len))
    with MemoryTracker(model, optimizer, live=False) as small:
        step(model, optimizer, tokens)
    peak, activations = small.peak, small.peak.by_category["activations"]
    print(f"{batch:>4} × {seq_len:<6} {peak.phase:<15}{peak.total:>14,}{activations:>15,}")

# %% [markdown]
# With few tokens the peak is in the optimizer's step, with many at the loss. The peak *moved*. That matters for what
# follows in this course: a technique that shrinks activations cannot lower a peak in the optimizer's step.
#
# When a run does not fit, ask the tracker who is there at the peak:

# %%
with MemoryTracker(model, optimizer, title="8 × 256 tokens: the logits rule") as tracker:
    step(model, optimizer, torch.randint(0, 8192, (8, 256)))

for holder in tracker.largest_at_peak(6):
    print(
        f"{holder.nbytes:>12,} bytes  {holder.category:<12} {holder.op:<38} {holder.module}"
    )

# %% [markdown]
# The three largest tensors have the same size, and none of them belongs to a Transformer block. Section 5 explains
# them.

# %% [markdown]
# ## 3 · What autograd really saves
#
# A claim: *a network of five modules (Linear, ReLU, Linear, ReLU, Linear) stores five intermediate tensors for
# backward.* You can ask autograd itself. Whenever it saves a tensor, it calls a hook, if you give it one.

# %%
guess_c = predict_first(
    "1.c",
    "The five modules: how many different activations (storages) are saved?",
    unit="storages",
)

# %%
net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
saved = []


def pack(tensor):
    saved.append(tensor)
    return tensor


with saved_tensors_hooks(pack, lambda tensor: tensor):
    net(torch.randn(1, 2))
weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
names = {}
for tensor in saved:
    pointer = tensor.untyped_storage().data_ptr()
    name = names.setdefault(pointer, f"storage {chr(65 + len(names))}")
    print(tuple(tensor.shape), name, "a weight" if pointer in weights else "an activation")

# %%
activations = [t for t in saved if t.untyped_storage().data_ptr() not in weights]
different = {t.untyped_storage().data_ptr() for t in activations}
print(
    len(saved),
    "tensors saved,",
    len(activations),
    "of them activations, in",
    len(different),
    "storages",
)
guess_c.reveal(measured=len(different))
claims.show("C05", "C06")

# %% [markdown]
# Why so few? The backward of `Linear` needs its *input*, not its output. The backward of `ReLU` needs its *output*, and
# that is the same tensor that the next `Linear` saves as its input: one storage (the block of memory behind a tensor),
# two users. **Count storages, not tensors and not layers.**
#
# And why are only two of the three weights saved? A `Linear` needs its weight for the gradient of its *input*. The
# input of the first `Linear` is the data, which needs no gradient.
#
# ### Exercise 1.2 · the bytes that autograd saves
#
# ●●○ · 8 minutes · trains: saved-tensor hooks, and thinking in storages rather than tensors
#
# Write `saved_bytes(model, x)`: the bytes of all storages that `model(x)` saves for backward, each storage once, the
# model's own parameters left out. You will use it on a real Transformer block right after.
#
# <details><summary>Hint 1: the frame</summary>
#
# The cells above have all the parts: a `pack` hook that notes what it sees, `saved_tensors_hooks`, one forward.
#
# <details><summary>Hint 2: each storage once</summary>
#
# Note `storage.data_ptr()` as the key and `storage.nbytes()` as the value of a dict, where
# `storage = tensor.untyped_storage()`.
#
# <details><summary>Hint 3: a slice is not small</summary>
#
# A saved view keeps its whole storage alive. `tensor.nbytes` gives the view's bytes, and you want the storage's.
#
# </details></details></details>


# %%
def saved_bytes(model, x):
    ### BEGIN SOLUTION
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(nbytes for pointer, nbytes in found.items() if pointer not in own)
    ### END SOLUTION


saved_bytes = check("1.2", saved_bytes)

# %% [markdown]
# ## 4 · A Transformer block, tensor by tensor
#
# Now take a block of the tiny Llama: 2 sequences of 128 tokens, hidden size h = 256, MLP width f = 688, float32, fused
# attention. T = 2 × 128 is the number of tokens. Attention cuts h into 8 **heads** of 32 numbers. Go through the block
# and ask at each operation: *what does its backward need?*
#
# | part | saved for backward | numbers |
# |---|---|---|
# | norm | its input, 1/rms, the normalised input | 2 T·h + T |
# | query, key, value | their common input | T·h |
# | attention | q, k, v, its result, one log-sum-exp a row | 4 T·h + T·heads |
# | norm | as above | 2 T·h + T |
# | gate, up | their common input | T·h |
# | gate × up | gate, silu(gate), up, the product | 4 T·f |
#
# rms is the root mean square of a token's numbers. The **log-sum-exp** is the logarithm of the softmax's denominator.
# Each head has its own softmax for each token, hence T·heads. The attention's result is also the input of its output
# layer, and the product is also the input of `down`: each counts once. Add up the column, times 4 bytes, and you have
# your prediction.

# %%
guess_d = predict_first(
    "1.d", "One block, 2 × 128 tokens, float32, fused attention: how many bytes are saved?"
)


# %%
class Block(nn.Module):
    """One block of a Llama as a module of one argument."""

    def __init__(self, llama, seq_len):
        super().__init__()
        self.layer = llama.model.layers[0]
        position_ids = torch.arange(seq_len)[None]
        self.rotary = llama.model.rotary_emb(torch.zeros(1), position_ids)

    def forward(self, x):
        return self.layer(x, position_embeddings=self.rotary)


def rotary_bytes(block):
    return sum(table.untyped_storage().nbytes() for table in block.rotary)


# %%
block = Block(model, seq_len=128)
x = torch.randn(2, 128, 256, requires_grad=True)
measured = saved_bytes(block, x) - rotary_bytes(
    block
)  # all blocks share one pair of rotary tables

tiny = accounting.SHAPES["tiny Llama"]
items = accounting.block_activations(tiny, 2, 128, precision="float32", attention="fused")
guess_d.reveal(formula=sum(items.values()), measured=measured)
for name, nbytes in items.items():
    print(f"{nbytes:>10,}  {name}")

# %% [markdown]
# Your sum is right to the byte. And notice what is *not* in the list: the attention scores. Fused attention (PyTorch's
# `scaled_dot_product_attention`) never keeps that square of sequence × sequence. It computes the square again in
# backward, tile by tile. Eager attention keeps it. How much is that?

# %%
print(f"{'':14}{'fused':>14}{'eager':>14}")
for seq_len in (64, 128, 256, 512):
    row = []
    for attention in ("sdpa", "eager"):
        llama = models.tiny_llama(layers=1, attention=attention)
        block = Block(llama, seq_len)
        x = torch.randn(2, seq_len, 256, requires_grad=True)
        row.append(saved_bytes(block, x) - rotary_bytes(block))
    print(
        f"2 × {seq_len:<4} tokens {row[0]:>13,} {row[1]:>13,}   {row[1] / row[0]:.2f} times"
    )

# %% [markdown]
# If you double the sequence, fused attention doubles. Eager attention more than doubles, because one of its terms grows
# with the square.
#
# Other blocks have other rows. `LayerNorm` keeps its input, and a mean and 1/std for each token. `GELU` keeps its
# input. Dropout keeps a mask with a number for each number of its input.
#
# ### Exercise 1.3 · what eager attention saves on top
#
# ●●○ · 5 minutes · trains: the one term that grows with the square of the sequence
#
# Write `eager_surplus(batch, seq_len, heads)`: the bytes that one float32 block saves *more* with eager attention than
# with fused attention. (There are as many key and value heads as query heads, and no dropout.)
#
# <details><summary>Hint 1: what eager keeps</summary>
#
# The softmax: for every sequence and every head a square of `seq_len` by `seq_len` numbers. The zeros above the
# diagonal are stored like any other number.
#
# <details><summary>Hint 2: what fused keeps instead</summary>
#
# The log-sum-exp, one float32 number for each row of scores. Subtract it.
#
# </details></details>


# %%
def eager_surplus(batch, seq_len, heads):
    ### BEGIN SOLUTION
    rows = batch * heads * seq_len
    return 4 * rows * seq_len - 4 * rows
    ### END SOLUTION


eager_surplus = check("1.3", eager_surplus)

# %%
print("measured above, 2 × 512 tokens:", f"{row[1] - row[0]:,}")
print("your formula:                  ", f"{eager_surplus(2, 512, 8):,}")

# %% [markdown]
# Several claims in our source documents compute the memory of a large block and find that the scores dominate. You can
# check their arithmetic, and the block itself:

# %%
claims.show("C37", "C38", "C52")

# %% [markdown]
# **Advice about attention memory has an age.** It was right for eager attention. With a fused kernel the largest
# tensors of a block are in the MLP.
#
# What grows with what? Gradients do not depend on how much you feed. Activations do. The next table has both:

# %%
print(f"{'tokens':>10}{'gradients':>14}{'activations':>14}")
for batch, seq_len in [(1, 64), (2, 64), (4, 64), (4, 128), (4, 256)]:
    with MemoryTracker(model, optimizer, live=False) as small:
        step(model, optimizer, torch.randint(0, 8192, (batch, seq_len)))
    lines = small.timeline.by_category
    gradients, activations = max(lines["gradients"]), max(lines["activations"])
    print(f"{batch:>4} × {seq_len:<4}{gradients:>13,}{activations:>14,}")
claims.show("C07")

# %% [markdown]
# ## 5 · The logits spike
#
# Here are the three tensors on top of the peak again. The last layer turns each token into one number *per word of the
# vocabulary*, and the loss is computed in float32, whatever the precision of the model.

# %%
vocab, hidden = smol.config.vocab_size, smol.config.hidden_size
print(f"SmolLM2: {vocab:,} words, hidden size {hidden}")
print(f"a token's logits are as wide as {vocab / hidden:.0f} of its hidden states")

# %% [markdown]
# When backward begins, three tensors of that shape are alive at once: the **log-softmax** that forward saved, the
# **gradient with respect to it**, and the **gradient of the logits** that is computed from both.
#
# ### Exercise 1.4 · the logits spike
#
# ●●○ · 5 minutes · trains: seeing the loss as the largest layer of a small model
#
# Write `logits_spike(batch, seq_len, vocab)`: the bytes of those three tensors.
#
# <details><summary>Hint 1: the shape</summary>
#
# One number for each sequence, position and word. Transformers shifts the *labels* by one, and the logits keep their
# length.
#
# <details><summary>Hint 2: the dtype</summary>
#
# float32, all three.
#
# </details></details>


# %%
def logits_spike(batch, seq_len, vocab):
    ### BEGIN SOLUTION
    float32 = 4
    return 3 * float32 * batch * seq_len * vocab
    ### END SOLUTION


logits_spike = check("1.4", logits_spike)

# %%
spike = logits_spike(8, 256, 8192)
print(f"three tensors of the 8 × 256 step above: {spike:,} bytes")
largest = sum(holder.nbytes for holder in tracker.largest_at_peak(3))
print(f"the three largest holders at its peak:   {largest:,} bytes")
print(f"share of that peak: {spike / tracker.peak.total:.0%}")
print("SmolLM2 at 8 × 1024 tokens:", format_bytes(logits_spike(8, 1024, 49152)))

# %% [markdown]
# A model of half a gigabyte asks for gigabytes when it computes its loss. Look here first when a *small* model with a
# *large* vocabulary runs out of memory. Lesson 05 makes the spike smaller with a chunked loss.
#
# ## 6 · Precision recipes
#
# "Mixed precision halves the memory" is true of something. Four recipes are in use, and they keep different things:
#
# | recipe | weights | gradients | Adam's moments | compute |
# |---|---|---|---|---|
# | **float32** | float32 | float32 | float32 | float32 |
# | **bf16** (pure) | bf16 | bf16 | bf16 | bf16 |
# | **autocast-bf16** (`bf16=True` in the HF Trainer, over float32 weights) | float32 | float32 | float32 | bf16 |
# | **float32-master** (DeepSpeed, Megatron) | bf16 + a float32 copy | bf16 | float32 | bf16 |
#
# ### Exercise 1.5 · bytes per parameter
#
# ●○○ · 5 minutes · trains: telling precision recipes apart by what they keep
#
# Write `bytes_per_parameter(recipe)` for the four names `"float32"`, `"bf16"`, `"autocast-bf16"` and
# `"float32-master"`: weight, gradient, both of AdamW's moments, and the master copy where there is one.
#
# <details><summary>Hint 1: autocast</summary>
#
# Autocast casts on the way into an operation. What is *kept* stays in float32.
#
# <details><summary>Hint 2: the master recipe</summary>
#
# 2 for the weight, 2 for the gradient, and three float32 numbers: the master copy and both moments.
#
# </details></details>


# %%
def bytes_per_parameter(recipe):
    ### BEGIN SOLUTION
    weights_gradients_moments = {
        "float32": (4, 4, 8),
        "bf16": (2, 2, 4),
        "autocast-bf16": (4, 4, 8),
        "float32-master": (2 + 4, 2, 8),
    }
    return sum(weights_gradients_moments[recipe])
    ### END SOLUTION


bytes_per_parameter = check("1.5", bytes_per_parameter)

# %% [markdown]
# Now measure it on the tiny Llama. (Three of the four recipes are a line or two of PyTorch.)


# %%
def residents_of(dtype, autocast):
    llama = models.tiny_llama(dtype=dtype)
    adam = torch.optim.AdamW(llama.parameters(), foreach=False)
    with MemoryTracker(llama, adam, live=False) as small:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = llama(input_ids=ids, labels=ids).loss
            loss.backward()
            adam.step()
            adam.zero_grad(set_to_none=True)
    lines = small.timeline.by_category
    return [
        max(lines[name]) for name in ("parameters", "gradients", "optimizer", "activations")
    ]


# %%
print("recipe          parameters   gradients   optimizer activations  per parameter")
for recipe, dtype, autocast in [
    ("float32", torch.float32, False),
    ("bf16", torch.bfloat16, False),
    ("autocast-bf16", torch.float32, True),
]:
    row = residents_of(dtype, autocast)
    cells = "".join(f"{nbytes:>12,}" for nbytes in row)
    print(f"{recipe:<14}{cells}{sum(row[:3]) / n:>14.3f}")

# %% [markdown]
# Two things may surprise you. Pure bf16 halves the residents and barely changes the activations: most of them here are
# the logits of section 5, and the loss works on those in float32. And autocast halves *nothing* of the residents, while
# its activations *grow*. What the blocks save shrinks, but autocast keeps bf16 copies of all weights through forward
# and backward. With a small batch the copies cost more than the blocks save.
#
# Now take a 7B model. The best-known table of our sources says 14 + 14 + 56 GB plus activations, "in FP16".

# %%
seven = accounting.SHAPES["Llama-2-7B"]
print(f"{seven.name}, {seven.parameters:,} parameters, 1 × 2048 tokens; GiB")
print("recipe          parameters gradients optimizer     saved      peak")
for recipe in ("float32", "bf16", "autocast-bf16", "float32-master"):
    kept = accounting.resident_bytes(seven, precision=recipe)
    saved = accounting.model_activations(seven, 1, 2048, precision=recipe)
    peak = accounting.estimate(seven, batch_size=1, seq_len=2048, precision=recipe).total
    row = [*kept.values(), sum(saved.values()), peak]
    print(f"{recipe:<16}" + "".join(f"{nbytes / 2**30:>10.1f}" for nbytes in row))

# %%
claims.show("C01", "C33", "C32", "C36")

# %% [markdown]
# ## 7 · Tied weights: two names, one storage
#
# SmolLM2's output layer *is* its embedding table. It has two names, and `state_dict()` lists both. It is one storage,
# and the tracker counts storages.

# %%
table, head = smol.model.embed_tokens.weight, smol.lm_head.weight
print(
    "same storage:", table.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()
)
print(f"counted by name:    {sum(t.nbytes for t in smol.state_dict().values()):>13,} bytes")
print(f"counted by storage: {resident_bytes(smol)['parameters']:>13,} bytes")
share = table.numel() / sum(p.numel() for p in smol.parameters())
print(f"the table is {share:.0%} of the model")
print(f"in training, tying saves as much again: {format_bytes(16 * table.numel())}")

# %% [markdown]
# Code that adds up by name counts the table twice. For a small model with a large vocabulary that is a large error.

# %% [markdown]
# ## 8 · Three steps under a budget
#
# A `budget` turns your machine into a card of that size: the first allocation that goes past it raises
# `BudgetExceeded`, and says who holds what. The next cell has a training loop as you find it everywhere. It holds
# something that it does not need.

# %%
from gradmem_lib import BudgetExceeded
from gradmem_lib.course import train_budget, train_setting

card = train_budget()
print(f"the card for this exercise: {card:,} bytes")


def usual_loop(model, optimizer, batches):
    losses = []
    for ids in batches:
        output = model(input_ids=ids, labels=ids)
        losses.append(output.loss.item())
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


# %%
llama, adam, batches = train_setting()
try:
    with MemoryTracker(
        llama, adam, budget=card, title="the usual loop, on a card that is just too small"
    ):
        usual_loop(llama, adam, batches)
except BudgetExceeded as error:
    print(error)

# %% [markdown]
# ### Exercise 1.6 · three steps under a budget
#
# ●●● · 10 minutes · trains: finding what a training loop holds without needing it
#
# Write `train(model, optimizer, batches)`: one step on each batch, returning the list of losses as floats, with a peak
# of at most the bytes printed above. Keep the model, the batches and the losses as they are, and only let go of what is
# no longer needed.
#
# <details><summary>Hint 1: who is alive?</summary>
#
# In the picture above, when does the peak come, and which names of the loop still point to something large then?
#
# <details><summary>Hint 2: the output object</summary>
#
# `output` holds the logits. It lives through backward, and into the *next* forward, until the name is bound again.
#
# <details><summary>Hint 3: the smallest change</summary>
#
# Keep only the loss: `loss = model(...).loss`. Everything else goes at once.
#
# </details></details></details>


# %%
def train(model, optimizer, batches):
    ### BEGIN SOLUTION
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses
    ### END SOLUTION


train = check("1.6", train)

# %%
llama, adam, batches = train_setting()
with MemoryTracker(
    llama, adam, budget=card, title="the same steps, holding only what they need"
) as tracker:
    print("losses", [f"{loss:.2f}" for loss in train(llama, adam, batches)])
print(f"peak {tracker.peak.total:,} of {card:,} bytes")

# %% [markdown]
# ## 9 · What you can now do
#
# - **Residents**: 16 bytes a parameter in float32 *and* in autocast, 8 in pure bf16, 16 with a float32 master copy.
# - **The peak is a moment.** With few tokens it is the optimizer's step, with many the loss. Ask
#   `tracker.peak_by_phase`.
# - **Autograd saves what backward needs**, storage by storage. For a Llama block that is about 10 T·h + 4 T·f numbers,
#   and no scores, if attention is fused.
# - **The logits** are the largest layer of a small model: 12 bytes for every token and every word.
# - **Let go**: the model's output object is the most common thing that a loop holds for nothing.
#
# `python -m gradmem_lib progress` shows how far you have come. Next is lesson 02, where you write Adam yourself and see
# where its bytes come from.
