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
# *59 minutes: sections 1 to 7, with exercises 1.1 and 1.2. 91 more are optional. You need: lesson 00, and a PyTorch
# training loop that you could write yourself.*
#
# <!-- picture: first run -->
#
# "CUDA out of memory" is a sum that came out too large. After this lesson you can
#
# - name what training keeps in memory, and give its bytes for any model;
# - say *when* in a step the peak comes, and why it moves;
# - list what autograd keeps from a Transformer block, tensor by tensor, and predict it to the byte;
# - tell four precision recipes apart by what they really cost.
#
# This lesson's bar gets no shorter: first you learn what it is made of.

# %%
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gradmem_lib import MemoryTracker, accounting, check, format_bytes, predict_first
from gradmem_lib.course import claims, models, texts

# %% [markdown]
# ## 1 · What a step holds
#
# AdamW trains lesson 00's tiny Llama.

# %%
model = models.tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
ids = torch.randint(0, 8192, (2, 128), generator=torch.Generator().manual_seed(0))

n = sum(p.numel() for p in model.parameters())
print(f"{n:,} parameters, {model.dtype}")

# %% [markdown]
# A training step holds four kinds of long-lived bytes. The first three are the **residents**: their bytes do not depend
# on the batch.
#
# | category | what it is | when it lives |
# |---|---|---|
# | **parameters** | the weights | always |
# | **gradients** | one number for every trained weight | from backward to `zero_grad` |
# | **optimizer states** | Adam: two moving averages (*moments*) for every trained weight | from the first `step()` on |
# | **activations** | what forward saves because backward needs it | from forward to backward |
#
# Everything else is **temporary**: made by one operation, gone soon after. It counts at the peak.

# %%
guess_a = predict_first(
    "1.a",
    "Parameters, gradients and optimizer states, together: how many bytes?",
)

# %% [markdown]
# The whole course is about this step:


# %%
def step(model, optimizer, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


with MemoryTracker(model, optimizer, title="a tiny Llama's first two steps") as tracker:
    step(model, optimizer, ids)
    step(model, optimizer, ids)

# %% [markdown]
# The parameters are there from the start. Activations pile up in forward. In backward they go, while gradients grow in
# their place. The optimizer's states appear *inside* the first `step()` and never leave. So the second step starts
# from a higher floor: **a run that survives its first step can still fail in its second.** The next cell takes the
# most bytes of each category over both steps.


# %%
def most(tracker):
    return {name: max(line) for name, line in tracker.timeline.by_category.items()}


names = ["parameters", "gradients", "optimizer"]
residents = {name: most(tracker)[name] for name in names}
print("most bytes of each:", residents)
guess_a.reveal(formula=16 * n, measured=sum(residents.values()))

# %% [markdown]
# That sum is sixteen bytes a parameter: <!-- holds: sum(residents.values()) // n == 16 --> 4 for the weight, 4 for its
# gradient, 8 for Adam's two moments. The formula misses a few bytes, because AdamW also keeps a *step counter*, one
# float32 number for each parameter tensor.
# <!-- holds: residents["optimizer"] == 8 * n + 4 * len(list(model.parameters())) -->
#
# ### Exercise 1.1 · the bytes that stay
#
# ●○○ · 6 minutes · trains: adding up parameters, gradients and AdamW's states
#
# Write `resident_bytes(model)`. It returns a dict with the bytes of `"parameters"`, `"gradients"` and `"optimizer"` for
# a model that trains with AdamW. The model may have any dtype, frozen parameters and tied weights (one tensor under two
# names). Buffers do not count. Run nothing: shapes and dtypes tell all of it.
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
# however large the tensor. <!-- holds: {states["step"].nbytes for states in optimizer.state.values()} == {4} -->
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

# %% [markdown]
# Compare your result with the tracker's:

# %%
print(resident_bytes(model) == residents)

# %% [markdown]
# The two agree to the byte.
#
# ## 2 · The life of a step: where is the peak?
#
# Residents are the floor. A run fails at its *peak*, and the peak is one moment. Which one? Take SmolLM2-135M,
# pretrained, on real text. Its first load can take a minute.

# %%
smol, tokenizer = models.smollm2()
smol_optimizer = torch.optim.AdamW(smol.parameters(), lr=1e-5, foreach=False)
smol_ids = texts.batch(tokenizer, batch_size=2, seq_len=128)

print(f"{sum(p.numel() for p in smol.parameters()):,} parameters, {smol.dtype}")

# %%
guess_b = predict_first(
    "1.b", "The peak of SmolLM2's step, float32, AdamW, 2 × 128 tokens?"
)

# %% [markdown]
# Where is the plot's highest point, and what is it made of?

# %%
with MemoryTracker(
    smol, smol_optimizer, title="SmolLM2, two training steps"
) as smol_tracker:
    for _ in range(2):
        step(smol, smol_optimizer, smol_ids)

# %%
shape = accounting.SHAPES["SmolLM2-135M"]
estimate = accounting.estimate(shape, batch_size=2, seq_len=128, precision="float32")
guess_b.reveal(formula=estimate.total, measured=smol_tracker.peak.total)
print("most bytes in each phase:", smol_tracker.peak_by_phase)
print("the output layer's weight:", format_bytes(smol.lm_head.weight.nbytes))

# %% [markdown]
# Did you expect the peak where the activations are highest? With so few tokens the activations are a small part, and
# backward and the optimizer's step are almost level. (`idle` is the time between phases.) Three moments compete. The
# formula adds up the bytes of each, and takes the largest:
#
# 1. **the loss**: when backward begins, all activations are alive, and the loss works on a score for every word of the
#    vocabulary;
# 2. **the end of backward**: activations are gone, gradients are complete, and the last operation makes the embedding's
#    gradient, as large as the embedding;
# 3. **the optimizer's step**: all gradients are there, and AdamW's loop needs at least two temporaries as large as the
#    largest parameter. <!-- holds: smol_tracker.peak_by_phase["optimizer_step"] - sum(resident_bytes(smol).values())
#    >= 2 * smol.lm_head.weight.nbytes -->
#
# A band of temporaries, {{smol.lm_head.weight.nbytes / 2**20:.0f}} MiB high, runs through all of backward: the gradient of
# the output layer's weight. In SmolLM2 this weight *is* the embedding table (tied), so it is used twice.
# <!-- holds: smol.lm_head.weight is smol.model.embed_tokens.weight --> Autograd holds the first gradient until the
# second comes, at the end of backward. Then three tensors of {{smol.lm_head.weight.nbytes / 2**20:.0f}} MiB are alive:
# both gradients and their sum. <!-- holds: smol_tracker.peak_by_phase["backward"] - sum(resident_bytes(smol).values())
# >= 2 * smol.lm_head.weight.nbytes -->
#
# Which moment wins depends on the number of tokens. For the tiny Llama, the next cell prints the peak's phase and
# bytes, and the most bytes of gradients and activations:

# %%
for batch, seq_len in [(1, 16), (2, 64), (2, 128), (8, 128), (8, 256)]:
    tokens = torch.randint(0, 8192, (batch, seq_len))
    with MemoryTracker(model, optimizer, live=False) as small:
        step(model, optimizer, tokens)
    held = small.peak.total, most(small)["gradients"], most(small)["activations"]
    print(
        f"{batch} × {seq_len:<5}{small.peak.phase:<15}",
        *(f"{nbytes:>12,}" for nbytes in held),
    )

# %% [markdown]
# With few tokens the peak is in the optimizer's step, with many at the loss, where backward begins: activations grow
# with every token, and gradients do not. So a technique that shrinks activations cannot lower a peak in the optimizer's
# step.
#
# When a run does not fit, ask the tracker who is there at the peak:

# %%
with MemoryTracker(
    model, optimizer, title="8 × 256 tokens: the logits are largest"
) as tracker:
    step(model, optimizer, torch.randint(0, 8192, (8, 256)))
for holder in tracker.largest_at_peak(4):
    print(f"{holder.nbytes:>12,}", holder.category, holder.module, holder.op)

# %% [markdown]
# ## 3 · The logits spike
#
# The three largest tensors have one size, and none belongs to a Transformer block. The last layer turns each token into
# one number *per word of the vocabulary*: its **logits**. The loss is computed in float32, whatever the precision of
# the model. When backward begins, three tensors of that shape are alive at once:
#
# - the **log-softmax** that forward saved;
# - the **gradient of the log-softmax**;
# - the **gradient of the logits**, which is computed from both.
#
# Here each has 8 × 256 × 8192 numbers of 4 bytes. How much are all three for SmolLM2 and 8 × 1024 tokens?

# %%
spike = 3 * 4 * 8 * 1024 * smol.config.vocab_size
print("SmolLM2 at 8 × 1024 tokens:", format_bytes(spike))

# %% [markdown]
# A model of half a gigabyte asks for gigabytes when it computes its loss.
# <!-- holds: round(sum(p.nbytes for p in smol.parameters()) / 1e9, 1) == 0.5 and spike > 4e9 --> Look here first when a *small* model with a
# *large* vocabulary runs out of memory. And do not keep the logits: after `output = model(...)`, the name `output` holds
# them through backward, and into the next forward. `loss = model(...).loss` lets them go at once. (The first optional
# section gives you a loop to correct.)
#
# ## 4 · What autograd really saves
#
# The course tests what popular guides claim about training memory. Here is one claim: *a network of five modules (Linear,
# ReLU, Linear, ReLU, Linear) stores five intermediate tensors for backward.* Is it true? When autograd saves a tensor, it
# can call a function of yours: a *hook*. A second hook hands the tensor back in backward. A *storage* is the block of
# memory behind one or more tensors. The cells below list what is saved.

# %%
guess_c = predict_first(
    "1.c",
    "How many storages are saved, not counting weights?",
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

# %%
weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
storages = {}
for tensor in saved:
    pointer = tensor.untyped_storage().data_ptr()
    if pointer not in weights:
        storages.setdefault(pointer, f"an activation, storage {len(storages) + 1}")
    print(tuple(tensor.shape), storages.get(pointer, "a weight"))
guess_c.reveal(measured=len(storages))
claims.show("C05")

# %% [markdown]
# There are three: the data and each ReLU's output. So only two of the claim's five are kept. The backward of `Linear`
# needs its *input*, not its output. The backward of `ReLU` needs its *output*, and the next `Linear` saves the same
# tensor as its input: one storage, two users. **Count storages, not tensors and not layers.** (Click the claim to open
# it. `docs/ledger.md` has all {{len(claims.CLAIMS)}}.)
#
# Why are only two of the three weights saved? A `Linear` needs its weight for the gradient of its *input*. The
# input of the first `Linear` is the data, which needs no gradient.
#
# ### Exercise 1.2 · the bytes that autograd saves
#
# ●●○ · 8 minutes · trains: saved-tensor hooks, and thinking in storages rather than tensors
#
# Write `saved_bytes(model, x)`: the bytes of all storages that `model(x)` saves for backward, each storage once, the
# model's own parameters (frozen ones too) left out. A buffer that is saved counts.
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
# ## 5 · A Transformer block, tensor by tensor
#
# Now take a block of the tiny Llama: T = 2 × 128 tokens, hidden size h = {{tiny.hidden}}, MLP width f =
# {{tiny.intermediate}}, float32, *fused* attention (PyTorch's `scaled_dot_product_attention`). Attention cuts h into 8 **heads** of 32 numbers. The MLP is
# down(silu(gate(x)) × up(x)), with three linear layers. The block's input has T·h numbers, which are {{4 * 2 * 128 * tiny.hidden:,}} bytes. How
# much does the block save for backward?

# %%
guess_d = predict_first("1.d", "How many bytes does this block save for backward?")

# %% [markdown]
# Ask at each operation: *what does its backward need?*
#
# | part | saved for backward | numbers |
# |---|---|---|
# | norm | its input, 1/rms, the normalised input | 2 T·h + T |
# | query, key, value | their common input | T·h |
# | attention | q, k, v, its result, a log-sum-exp for each token and head | 4 T·h + T·heads |
# | norm | as above | 2 T·h + T |
# | gate, up | their common input | T·h |
# | gate × up | gate, silu(gate), up, the product | 4 T·f |
#
# rms is the root mean square of a token's numbers. A norm multiplies the normalised input by a weight. The result is
# another tensor: the common input of the next row. The **log-sum-exp** is the logarithm of the softmax's denominator. Each head has its own
# softmax for each token, hence T·heads. The attention's result is also the input of its output layer, and the product
# is also the input of `down`: each counts once. The block's two additions keep nothing. The sum of the column, times 4
# bytes, is the formula. <!-- holds: sum(items.values()) == 4 * 256 * (10 * 256 + 2 + 8 + 4 * 688) --> To measure one block, the next cell subtracts a model of one block from a model of two.


# %%
def one_block(seq_len, attention="sdpa"):
    one, two = (models.tiny_llama(layers=layers, attention=attention) for layers in (1, 2))
    ids = torch.randint(0, 8192, (2, seq_len))
    return saved_bytes(two, ids) - saved_bytes(one, ids)


tiny = accounting.SHAPES["tiny Llama"]
items = accounting.block_activations(tiny, 2, 128, precision="float32")
guess_d.reveal(formula=sum(items.values()), measured=one_block(128))

# %% [markdown]
# The sum is right to the byte. The attention scores, a square of sequence × sequence, are *not* in the table. Fused
# attention computes them again in backward, tile by tile. *Eager* attention, one operation after the other, keeps their
# softmax:

# %%
for seq_len in (64, 128, 256, 512):
    fused, eager = one_block(seq_len), one_block(seq_len, "eager")
    print(
        f"2 × {seq_len:<4} fused {fused:>12,} eager {eager:>12,}   {eager / fused:.2f} times"
    )
claims.show("C52")

# %% [markdown]
# With fused attention, twice the sequence takes twice the bytes. <!-- holds: one_block(256) == 2 * one_block(128) --> With eager attention it takes more, because the
# softmax of all scores grows with the square.
# <!-- holds: one_block(256, "eager") > 2 * one_block(128, "eager") --> The claim counts eager attention, where scores dominate. **Advice about
# attention memory gets old.** With fused attention the largest tensors of a block are in the MLP.
# <!-- holds: max(items, key=items.get).startswith("mlp") -->
#
# Other blocks have other rows. In SmolLM2 three query heads share one key head and one value head, so k and v are a
# third as large as q. <!-- holds: shape.heads == 3 * shape.kv_heads --> `LayerNorm` keeps its input, and a mean and 1/std for each token. `GELU` keeps its input. Dropout
# keeps a mask as large as its input (on the CPU in float32, on CUDA a byte for each number).
#
# ## 6 · Precision recipes
#
# "Mixed precision halves the memory." Which memory? A *bf16* number takes 2 bytes. *Autocast* casts float32 inputs to
# bf16 inside an operation. How many bytes of parameters, gradients and AdamW's states are there for each parameter then?

# %%
guess_e = predict_first("1.e", "autocast-bf16: how many bytes stay for each parameter?")

# %% [markdown]
# Four recipes are in use:
#
# | recipe | weights | gradients | Adam's moments | compute |
# |---|---|---|---|---|
# | **float32** | float32 | float32 | float32 | float32 |
# | **bf16** (pure) | bf16 | bf16 | bf16 | bf16 |
# | **autocast-bf16** (`bf16=True` in Hugging Face's `Trainer`, float32 weights) | float32 | float32 | float32 | bf16 |
# | **float32-master** (DeepSpeed, Megatron) | bf16 + a float32 copy | bf16 | float32 | bf16 |
#
# The next cells measure the first three on the tiny Llama.


# %%
def kept(dtype, autocast=False):
    llama = models.tiny_llama(dtype=dtype)
    adam = torch.optim.AdamW(llama.parameters(), foreach=False)
    with MemoryTracker(llama, adam, live=False) as small:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = llama(input_ids=ids, labels=ids).loss
        loss.backward()
        adam.step()
    return most(small)


# %%
runs = {"float32": kept(torch.float32), "bf16": kept(torch.bfloat16)}
runs["autocast-bf16"] = kept(torch.float32, autocast=True)
columns = [*names, "activations"]
print(f"{'bytes of':<14}", *(f"{name:>12}" for name in columns))
for recipe, held in runs.items():
    print(f"{recipe:<14}", *(f"{held[name]:>12,}" for name in columns))
guess_e.reveal(formula=4 + 4 + 8, measured=sum(held[name] for name in names) // n)

# %% [markdown]
# Pure bf16 halves the residents. <!-- holds: sum(runs["bf16"][name] for name in names) // n == 8 --> In this small model
# it takes only a little off the activations, because the loss makes a float32 copy of the logits.
# <!-- holds: 0.8 < runs["bf16"]["activations"] / runs["float32"]["activations"] < 1 --> Autocast halves *nothing* of the
# residents, and here its activations *grow*. <!-- holds: sum(runs["autocast-bf16"][name] for name in names) // n == 16
# and runs["autocast-bf16"]["activations"] > runs["float32"]["activations"] --> What the
# blocks save shrinks, but autocast keeps bf16 copies of all weights through forward and backward. With a small batch
# the copies add more than the blocks lose.
#
# For a 7B model, a well-known guide has a table with 14 + 14 + 56 GB plus activations, "in FP16". Which recipe is that?

# %%
seven = accounting.SHAPES["Llama-2-7B"]
print(f"{seven.name}, GB", *(f"{name:>12}" for name in names))
for recipe in [*runs, "float32-master"]:
    states = accounting.resident_bytes(seven, precision=recipe)
    print(f"{recipe:<14}", *(f"{nbytes / 1e9:>12.1f}" for nbytes in states.values()))

# %%
claims.show("C01")

# %% [markdown]
# The guide's table is none of the four: it has 16-bit weights and gradients, float32 moments, and no master copy.
# (The cell above counts the master copy as optimizer.)
#
# ## 7 · What you can now do
#
# - **Residents**: 16 bytes a parameter in float32 *and* in autocast, 8 in pure bf16, 16 with a float32 master copy.
#   <!-- holds: [round(sum(accounting.resident_bytes(seven, precision=recipe).values()) / seven.parameters)
#   for recipe in ("float32", "autocast-bf16", "bf16", "float32-master")] == [16, 16, 8, 16] -->
# - **The peak is a moment.** With few tokens it is in the optimizer's step, with many at the loss.
# - **Autograd saves what backward needs**, storage by storage. For a Llama block with fused attention that is about 10
#   T·h + 4 T·f numbers.
# - **The logits** are the largest layer of a small model: <!-- holds: 12 * 2 * 128 * tiny.vocab > sum(items.values())
#   and 12 * 64 * shape.vocab > sum(accounting.block_activations(shape, 1, 64, precision="float32").values()) --> 12 bytes
#   for every token and every word. <!-- holds: spike == 12 * 8 * 1024 * smol.config.vocab_size -->
#
# Now look at lesson 00's last run again: 16 sequences at once, for a card of 48 MiB. The residents of this model are those of section 1.

# %%
from gradmem_lib.course import first_run

first_run()
print("residents:", format_bytes(sum(residents.values())))

# %% [markdown]
# The peak is at the loss, where three tensors of 64 MiB are alive (section 3).
# <!-- holds: 4 * 16 * 128 * tiny.vocab == 64 * 2**20 -->
# A smaller batch would shrink them, but the residents alone are more than twice the card. So no batch is small enough.
# <!-- holds: sum(residents.values()) > 2 * 48 * 2**20 --> Lessons 02 to 04 lower what is above the residents, and lesson
# 05 lowers the residents.
#
# In lesson 02 you write Adam yourself. (An exercise keeps its number for good, so the numbers in a lesson may be out of
# order.)
#
# ## Optional: three steps under a budget
#
# As in lesson 00, a `budget` turns your machine into a small card. The usual training loop below holds something that it
# does not need. Its error names two causes: find the one that costs nothing to remove.

# %%
from gradmem_lib import BudgetExceeded
from gradmem_lib.course import train_budget, train_setting

card = train_budget()


def usual_loop(model, optimizer, batches):
    losses = []
    for ids in batches:
        output = model(input_ids=ids, labels=ids)
        losses.append(output.loss.item())
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


# %%
llama, adam, batches = train_setting()
try:
    with MemoryTracker(llama, adam, budget=card, title="the usual loop, out of memory"):
        usual_loop(llama, adam, batches)
except BudgetExceeded as error:
    print(error)

# %% [markdown]
# ### Exercise 1.6 · three steps under a budget
#
# ●●● · 10 minutes · optional · trains: finding what a training loop holds without needing it
#
# Write `train(model, optimizer, batches)`: one step on each batch, returning the list of losses as floats, within the
# budget above. Keep model, batches and losses as they are, and let go of what is no longer needed.
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
        optimizer.zero_grad()
    return losses
    ### END SOLUTION


train = check("1.6", train)

# %% [markdown]
# ## Optional: a puzzle of lines
#
# A puzzle has two targets: bytes, and a price in time. The price is counted, so it is the same on every machine. When both are
# met, the check passes. It also says what the best known choice takes.
#
# ### Exercise 1.10 · lines in an order that fits
#
# ●●○ · 6 minutes · optional · trains: saying when each kind of bytes is there
#
# A small Llama makes its **first** update, on 8 rows, and it evaluates 24 rows without a graph. Write the lines in an order
# with a peak of at most **2.4 MB** and at most **6 passes**. This order has neither too many passes nor few enough bytes:
#
# `"forward 8, backward, step, zero_grad, evaluate 24"`
#
# Each `forward`, `backward` and `evaluate` is a pass through the model, and its number says for how many rows. Rows may be
# cut: `forward 4, backward, forward 4, backward` is the same update. So may be the evaluation, which can stand anywhere.
#
# <details><summary>Hint 1: the evaluation</summary>
#
# It needs the weights and its own logits. What else is alive before the first backward, and what after the first step?
#
# <details><summary>Hint 2: two forwards</summary>
#
# The second one runs beside the gradients of the first. So should both have as many rows?
#
# </details></details>

# %%
from gradmem_lib.course import LINES

lines = "evaluate 24, forward 5, backward, forward 3, backward, step, zero_grad"  # SOLUTION
check("1.10", lines)
LINES.show(lines)

# %% [markdown]
# ## Optional: a tracker in thirty lines
#
# How does `MemoryTracker` know these bytes? Build one that counts. It needs three things: a running sum of the bytes that
# are alive, the largest value that this sum had, and a **weak reference** to each storage. A weak reference keeps nothing
# alive, and calls a function when its storage is freed.

# %%
import weakref


class LiveBytes:
    """The bytes of all storages that are alive, and the most so far."""

    def __init__(self):
        self.sizes, self.live, self.peak = {}, 0, 0

    def add(self, tensor):
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer not in self.sizes:  # a view has another tensor's storage
            self.sizes[pointer] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.remove, pointer)

    def remove(self, pointer):
        self.live -= self.sizes.pop(pointer)


# %% [markdown]
# Who calls `add`? Inside a `TorchDispatchMode`, PyTorch hands each operation to a method of yours, in backward and in the
# optimizer's step too. The method runs the operation, and looks at what it made:

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class SmallTracker(TorchDispatchMode):
    def __init__(self, *held):
        super().__init__()
        self.bytes = LiveBytes()
        for tensor in held:  # what was made before
            self.bytes.add(tensor)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        values = made if isinstance(made, (tuple, list)) else [made]
        for value in values:
            if isinstance(value, torch.Tensor):
                self.bytes.add(value)
        return made


# %% [markdown]
# That is all. Now compare its peak with `MemoryTracker`'s, on the step of section 1:

# %%
held = [*model.parameters(), *model.buffers(), ids]
for states in optimizer.state.values():
    held += states.values()
with SmallTracker(*held) as small:
    step(model, optimizer, ids)
with MemoryTracker(model, optimizer, live=False) as tracker:
    step(model, optimizer, ids)
print(f"peak by thirty lines  {small.bytes.peak:,}")
print(f"peak by MemoryTracker {tracker.peak.total:,}")

# %% [markdown]
# The two peaks are the same, to the byte. The real one also finds model and optimizer states by itself, and says *who*
# holds the bytes and *when*: categories, phases, modules, a timeline, a budget. And it sees what no operation shows. The
# next cell frees a storage without an operation, as libraries do that spread a model over several cards:

# %%
with SmallTracker() as small, MemoryTracker(live=False) as tracker:
    weights = torch.ones(1024, 1024)
    weights.untyped_storage().resize_(0)
    print(f"alive by thirty lines  {small.bytes.live:,}")
    print(f"alive by MemoryTracker {tracker.current.total:,}")

# %% [markdown]
# Thirty lines still count 4 MiB that are gone. `gradmem_lib/measure/` has the rest, and `tracker.py` is a good place to
# begin.
#
# ## Optional: a history that grows
#
# Nothing later needs this section. The script below trains a small network, and keeps a history of losses and outputs.
# On a card of 2 MiB its first steps fit, and a later one does not. The numbers at the ends of the lines are for the
# exercise.

# %%
import torch.nn.functional as F

from gradmem_lib.course import history_setting


# %%
def with_history(model, optimizer, batches):  # 1
    history = []  # 2
    for x, y in batches:  # 3
        out = model(x)  # 4
        loss = F.mse_loss(out, y)  # 5
        loss.backward()  # 6
        optimizer.step()  # 7
        optimizer.zero_grad()  # 8
        history.append((loss, out))  # 9
    return [(loss.item(), out.mean().item()) for loss, out in history]  # 10


# %% [markdown]
# ### Exercise 1.9 · a history that grows
#
# ●○○ · 5 minutes · optional · trains: telling the line that makes a tensor from the line that keeps it
#
# Write `history_leak()`. It returns two things: the number of the line that keeps tensors which no later line needs, and
# the fixed script, a function with the same arguments. The fixed script returns the same history, trains the same
# weights, and stays within 2 MiB, however many batches there are.
#
# <details><summary>Hint 1: after the step</summary>
#
# In the next step, `out` and `loss` name new tensors. The old ones are freed, unless something else refers to them.
#
# <details><summary>Hint 2: a tensor or a number</summary>
#
# What does the last line need of each batch? `detach()` returns a tensor with the same storage. `.item()` returns a
# number of Python.
#
# </details></details>


# %%
def history_leak():
    """(the number of the line, the fixed script)."""
    ### BEGIN SOLUTION

    def fixed(model, optimizer, batches):
        history = []
        for x, y in batches:
            out = model(x)
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append((loss.item(), out.mean().item()))
        return history

    return 9, fixed
    ### END SOLUTION


history_leak = check("1.9", history_leak)

# %% [markdown]
# Which line did you name? Now run the script as it was, and read what the error says:

# %%
net, net_adam, pairs = history_setting()
try:
    with MemoryTracker(net, net_adam, budget="2 MiB", title="a history, out of memory"):
        with_history(net, net_adam, pairs)
except BudgetExceeded as error:
    print(error)

# %% [markdown]
# Each tooth of the picture begins a little higher than the one before. The bytes that grow are the striped band at its
# foot. The error names the two lines that *make* the tensors, and the list that *keeps* them.

# %% [markdown]
# ## Optional: more practice
#
# ### Exercise 1.7 · the table of a GPT-2 block
#
# ●●○ · 8 minutes · optional · trains: saying of each operation what its backward needs, in a block that you have not seen
#
# The next cell prints a block of GPT-2. `Conv1D` is a linear layer from `nx` to `nf` numbers: `c_attn` makes q, k and v
# in one go. `attn_dropout` does nothing with p = 0.
#
# Write `gpt2_block(batch, seq_len, hidden, heads)`: the bytes that such a block saves in training, in float32 on the CPU
# with fused attention. Return a dict with ten entries, in the order of forward: `"ln_1"`, `"attn.c_attn"`, `"attn"` (the
# attention itself), `"attn.c_proj"`, `"attn.resid_dropout"`, `"ln_2"`, `"mlp.c_fc"`, `"mlp.act"`, `"mlp.c_proj"`,
# `"mlp.dropout"`. A storage counts where it is saved first, so one entry is 0.
#
# <details><summary>Hint 1: linear layers</summary>
#
# Each keeps its input. The input of `attn.c_proj` is the attention's result, which `attn` has saved already.
#
# <details><summary>Hint 2: the widths</summary>
#
# With x = tokens · hidden, everything around attention is x numbers. The MLP is four times as wide: `mlp.act` keeps its
# input, 4 x, and its result is the input of `mlp.c_proj`.
#
# <details><summary>Hint 3: the small ones</summary>
#
# Each norm has 2 numbers for each token, and attention has one for each head of each token.
#
# </details></details></details>

# %%
gpt2 = models.tiny_gpt2(layers=1, activation="gelu_pytorch_tanh", dropout=0.1)
block = gpt2.transformer.h[0]
print(block)


# %%
def gpt2_block(batch, seq_len, hidden, heads):
    ### BEGIN SOLUTION
    tokens = batch * seq_len
    x = tokens * hidden
    rows = {"ln_1": x + 2 * tokens, "attn.c_attn": x, "attn": 4 * x + tokens * heads}
    rows |= {"attn.c_proj": 0, "attn.resid_dropout": x, "ln_2": x + 2 * tokens}
    rows |= {"mlp.c_fc": x, "mlp.act": 4 * x, "mlp.c_proj": 4 * x, "mlp.dropout": x}
    return {name: 4 * numbers for name, numbers in rows.items()}
    ### END SOLUTION


gpt2_block = check("1.7", gpt2_block)

# %%
x = torch.randn(2, 128, 256, requires_grad=True)
print(f"your table {sum(gpt2_block(2, 128, 256, 8).values()):,} bytes")
print(f"the block  {saved_bytes(block, x):,} bytes")

# %% [markdown]
# The two agree. (GPT-2's default GELU is several operations, and keeps more.)
#
# ### Exercise 1.8 · what dropout keeps
#
# ●●○ · 5 minutes · optional · trains: counting masks and results, and the mode that a model is in
#
# Here is an MLP in plain PyTorch: `Linear(h, 4 * h)`, `ReLU()`, `Dropout(0.1)`, `Linear(4 * h, h)`, `Dropout(0.1)`. Write
# `mlp_bytes(tokens, hidden, training)`: the bytes that it saves for backward in float32 on the CPU, in training or in
# evaluation mode. Its input requires a gradient.
#
# <details><summary>Hint 1: what each module keeps</summary>
#
# You know Linear and ReLU from section 4. Dropout multiplies its input by a mask. Which tensor does its backward need?
#
# <details><summary>Hint 2: which storages are the same?</summary>
#
# In evaluation mode dropout hands its input on, so ReLU's result and the second Linear's input are one storage. What does
# dropout hand on in training?
#
# <details><summary>Hint 3: the sums</summary>
#
# Training: 1 + 4 + 4 + 4 + 1 times tokens · hidden numbers.
# <!-- holds: mlp_bytes(16, 8, True) == 4 * (1 + 4 + 4 + 4 + 1) * 16 * 8 --> Evaluation: 1 + 4.
#
# </details></details></details>


# %%
def mlp_bytes(tokens, hidden, training):
    ### BEGIN SOLUTION
    x = tokens * hidden  # numbers that go into the MLP
    relu = 4 * x
    numbers = x + relu
    if training:
        mask, dropped, last_mask = 4 * x, 4 * x, x
        numbers += mask + dropped + last_mask
    return 4 * numbers
    ### END SOLUTION


mlp_bytes = check("1.8", mlp_bytes)

# %% [markdown]
# In training mode this MLP saves almost three times as much as in evaluation mode.
# <!-- holds: 2.7 < mlp_bytes(16, 8, True) / mlp_bytes(16, 8, False) < 3 -->

# %% [markdown]
# ### Exercise 1.3 · what eager attention saves on top
#
# ●●○ · 5 minutes · optional · trains: the one term that grows with the square of the sequence
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

# %% [markdown]
# ### Exercise 1.4 · the logits spike
#
# ●●○ · 5 minutes · optional · trains: seeing the loss as the largest layer of a small model
#
# Write `logits_spike(batch, seq_len, vocab)`: the bytes of the three tensors of section 3.
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

# %% [markdown]
# ### Exercise 1.5 · bytes per parameter
#
# ●○○ · 5 minutes · optional · trains: telling precision recipes apart by what they keep
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
