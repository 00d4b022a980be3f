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
# # 09 · Optimizers and adapters
#
# *60 minutes: sections 1 to 10, with exercises 9.1, 9.3, 9.5 and 9.8. 60 more are optional. You need: lessons 02 and
# 05, and the dtypes of lesson 07.*
#
# AdamW keeps two numbers beside every weight that it trains. You can keep smaller numbers, keep fewer, or train fewer
# weights. What does each choice save, and what does it do to the update? After this lesson you can
#
# - say how many bytes an optimizer keeps, how many more its step needs, and where it is the wrong choice;
# - write a quantizer, Lion and LoRA;
# - train SmolLM2 under 300 MiB, with every weight or with adapters.

# %%
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn, optim
from transformers import AutoModelForCausalLM

from gradmem_lib import AdamW8bit, MemoryTracker, Recipe, Waterfall, check, known_model
from gradmem_lib import predict, predict_first, prepare
from gradmem_lib.course import claims, models, runs, smollm2_peak, texts

# %% [markdown]
# Here is a run that has become larger. SmolLM2 trains with LoRA in bf16. To save memory, its frozen weights were put
# into 4 bits, as lesson 05 describes. `multiply` is what such a layer does now: `dequantized` writes its matrix out in bf16.


# %%
def multiply(layer, x):
    return F.linear(x, layer.dequantized(x.dtype))


# %%
small = known_model("SmolLM2-135M")[1]
settings = {"precision": "bf16", "lora_rank": 32, "lora_targets": ("q_proj", "v_proj")}


def peak(tokens, forward=None, **changes):
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16)
        prepare(net, Recipe(**settings | changes))
    for layer in net.modules():
        if forward and hasattr(layer, "packed"):  # a layer in 4 bits
            layer.forward = partial(forward, layer)
    ask = {"seq_len": tokens, "recipe": Recipe(precision=None), "target": "cpu"}
    return predict(net, batch_size=1, **ask).peak


# %%
grown = Waterfall(title="SmolLM2 with LoRA, 1,024 tokens")
grown.add("weights in bf16", peak(1024))
grown.add("in 4 bits", peak(1024, multiply, quantized_base=True))
grown

# %% [markdown]
# The weights shrank, as they should. <!-- holds: grown.bars[1].by_category["parameters"]
# < grown.bars[0].by_category["parameters"] and grown.bars[1].total > grown.bars[0].total --> So which part grew,
# and what keeps it? Section 7 gives the answer, and repairs the run.
#
# ## 1 · Two bills
#
# An optimizer takes memory twice. Its **states** stay from step to step. Its **temporaries** come and go within a
# step. `cost` measures both on the matrices in a small Llama's layers: states in bytes a weight, and temporaries in
# copies of the largest matrix.


# %%
def cost(name, make):
    llama = models.tiny_llama()
    weights = [p for p in llama.model.layers.parameters() if p.ndim == 2]
    optimizer = make(weights, lr=1e-3)
    for p in weights:
        p.grad = torch.randn_like(p)
    optimizer.step()
    with MemoryTracker(llama, optimizer, live=False) as tracker:
        optimizer.step()
    states = tracker.current.by_category["optimizer"] / sum(p.numel() for p in weights)
    on_top = (tracker.peak.total - tracker.current.total) / max(p.nbytes for p in weights)
    print(f"{name:<12}states {states:.3f} a weight, temporaries {on_top:.2f} matrices")
    return states


# %%
adamw = partial(optim.AdamW, foreach=False)
states = cost("AdamW", adamw)

# %% [markdown]
# In float32, AdamW keeps 8 bytes a weight, and its step needs three matrices more. Lesson 02 measured two. Here the
# matrix before is as large, and one temporary of its step is still alive in this one's.
#
# ## 2 · One byte a number
#
# A byte is one of 256 values. A **code** is a sorted table of 256 numbers from −1 (or 0) to 1. Divide a number by the
# largest magnitude among its neighbours, the **absmax**, and store the index of the nearest number in the code. If a
# whole tensor shared one absmax, a single large number would push all others towards 0. So each **block** of 256
# neighbours has its own, in float32. This is *blockwise quantization*
# ([Dettmers et al. 2022](https://arxiv.org/abs/2110.02861), with blocks of 2,048).

# %%
guess_a = predict_first(
    "9.a", "8-bit AdamW's moments: how many bytes a weight?", unit="bytes a weight"
)

# %% [markdown]
# ### Exercise 9.1 · moments in 8 bits
#
# ●●○ · 4 minutes · trains: blockwise quantization: what is stored, and what is read back
#
# Write `quantize(x, code, block)` for n float32 numbers `x`. Cut `x` into blocks, and return three tensors:
#
# - `indices` (n,), as uint8: the position in `code` of the value *nearest* to number / absmax;
# - `absmax`, one a block;
# - `back` (n,): the numbers read back from these two.
#
# <details><summary>Hint 1: blocks</summary>
#
# `F.pad(x, (0, -len(x) % block)).view(-1, block)` has one block in each row.
#
# <details><summary>Hint 2: the nearest</summary>
#
# The border between two values is their middle: `torch.bucketize(scaled, (code[1:] + code[:-1]) / 2)`.
#
# <details><summary>Hint 3: zeros</summary>
#
# `absmax.clamp(min=1e-30)` as the divisor keeps 0 / 0 away.
#
# </details></details></details>


# %%
def quantize(x, code, block):
    """The last block may be shorter. In a block of zeros, each index is that of the value nearest to 0."""
    ### BEGIN SOLUTION
    rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
    absmax = rows.abs().amax(dim=1)
    scaled = rows / absmax.clamp(min=1e-30)[:, None]
    indices = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2)
    back = (code[indices] * absmax[:, None]).flatten()[: len(x)]
    return indices.flatten()[: len(x)].to(torch.uint8), absmax, back
    ### END SOLUTION


quantize = check("9.1", quantize)

# %%
guess_a.reveal(formula=2 * (1 + 4 / 256), measured=round(cost("8-bit AdamW", AdamW8bit), 3))

# %% [markdown]
# The measured number is a little larger: it includes two codes, which all tensors share. `AdamW8bit` is one operator,
# like the kernel of the library bitsandbytes, so the tracker sees no temporaries.
#
# Try two codes on a real second moment v, squared gradients of a SmolLM2 matrix. One has equal distances.
# The other has equal *ratios* over seven powers of ten, so it is finer towards 0.

# %%
short = runs.size().short
LAYERS, UPDATES, TRIES, SEQ, HELD = (1, 1, 1, 16, 2) if short else (6, 8, 3, 64, 16)
model, tokenizer = models.smollm2()
training, held_out = texts.datasets(tokenizer, seq_len=SEQ, rows=32, held_out=HELD)
ids = training.ids[:2]
model(input_ids=ids, labels=ids).loss.backward()
weight = model.model.layers[20].mlp.down_proj.weight
gradient = weight.grad.clone()
model.zero_grad()

# %% tags=["nbval-ignore-output"]
v = gradient.square().flatten()
ratios = torch.cat([torch.zeros(1), torch.logspace(-7, 0, 255)])
for name, code in {"distances": torch.linspace(0, 1, 256), "ratios": ratios}.items():
    back = quantize(v, code, 256)[2]
    error = ((back - v).abs() / v).nanmedian()
    print(f"equal {name:<10} {(back == 0).float().mean():.0%} are 0, error {error:.1%}")

# %% [markdown]
# (These are medians of relative errors.) Equal distances round many v to 0.
# <!-- holds: (quantize(v, torch.linspace(0, 1, 256), 256)[2] == 0).float().mean() > 0.2 -->
# There AdamW divides m by `eps` alone, and
# the weight takes a huge step. So a code must be finer towards 0. `AdamW8bit` has bitsandbytes' code, with equal
# distances within each power of ten.
#
# ## 3 · Sums, signs and matrices
#
# **Adafactor** keeps the sums of v's rows and columns, and makes v from them in each step (exercise 9.2). It keeps no
# m. Lesson 05 chose its learning rate and `eps`.
#
# **Lion** keeps m and no v. Its update is a *sign*: a weight moves by lr, however small its gradient is.

# %% [markdown]
# ### Exercise 9.3 · Lion: a sign, and one state
#
# ●●○ · 4 minutes · trains: what an optimizer keeps, and what its update needs
#
# Lion keeps one momentum m. For each parameter with a gradient g: shrink the parameter as AdamW does, by 1 − lr ·
# weight_decay. Then subtract lr times the **sign** of beta1 · m + (1 − beta1) · g. Last, m becomes
# beta2 · m + (1 − beta2) · g. Write `step`, which only reads g. m lives in `self.state[p]`, in the parameter's dtype.
#
# <details><summary>Hint 1: the state</summary>
#
# `self.state[p]` is a dict, empty at first. `setdefault("exp_avg", torch.zeros_like(p))` makes m once.
#
# <details><summary>Hint 2: the blend</summary>
#
# `m.lerp(p.grad, 1 - beta1)` is a new tensor. `m.lerp_` changes m.
#
# </details></details>


# %%
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        ### BEGIN SOLUTION
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * m.lerp(p.grad, 1 - beta1).sign())
                m.lerp_(p.grad, 1 - beta2)
        ### END SOLUTION


Lion = check("9.3", Lion)

# %% [markdown]
# **Muon** keeps m too, and treats it as a *matrix*. A matrix stretches some directions more than others. In
# $m = USV^\top$, U and V only turn and mirror, and the *singular values* in S say how far each direction is stretched.
# In a gradient a few of them are far above the rest, so a step along m goes mostly in a few directions. Muon sets all
# singular values to about 1: its update is about $UV^\top$, which goes equally far in every direction. Five rounds of
# matrix products (Newton-Schulz) compute it. Embeddings and norms are left to AdamW. Here is one update:

# %%
lone = nn.Parameter(torch.zeros(64, 64))
lone.grad = torch.linalg.qr(torch.randn(64, 64))[0] * torch.logspace(0, -2, 64)
optim.Muon([lone], lr=1.0, weight_decay=0.0).step()
for name, matrix in {"gradient": lone.grad, "update": lone.detach()}.items():
    values = torch.linalg.svdvals(matrix)
    print(f"{name:<9} singular values from {values[0]:.1g} to {values[-1]:.1g}")

# %% [markdown]
# The update's singular values are far closer together. <!-- holds: values[0] < 2 * values[-1] --> Its numbers are
# smaller than those of AdamW's update, so Muon needs a learning rate of its own, or
# `adjust_lr_fn="match_rms_adamw"`, which makes them as large.
#
# ## 4 · One table
#
# Now compare six optimizers: their bytes, and how well SmolLM2 predicts held-out text after the same tokens. No
# learning rate suits all, so each gets three.
#
# We train the matrices of the last six layers. This takes some minutes. (The stored notebook makes one short update of
# one layer, at one rate.)

# %%
model.requires_grad_(False)
layers = model.model.layers[-LAYERS:]
matrices = [p.requires_grad_() for p in layers.parameters() if p.ndim == 2]
start = [p.detach().clone() for p in matrices]


def trial(make, rate):
    for p, old in zip(matrices, start, strict=True):
        p.data.copy_(old)
    optimizer = make(matrices, lr=rate)
    for ids in training.ids[: 4 * UPDATES].split(4):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(input_ids=held_out.ids, labels=held_out.ids).loss.item()


# %% tags=["nbval-ignore-output"]
momentum = partial(optim.SGD, momentum=0.9, foreach=False)
adafactor = partial(optim.Adafactor, eps=(1e-16, 1e-3), foreach=False)
muon = partial(optim.Muon, weight_decay=0.0)
rates = {
    "momentum": (momentum, 3e-2),
    "AdamW": (adamw, 3e-4),
    "8-bit AdamW": (AdamW8bit, 3e-4),
    "Adafactor": (adafactor, 1e-3),
    "Lion": (Lion, 3e-4),
    "Muon": (muon, 1e-2),
}
for name, (make, rate) in rates.items():
    cost(name, make)
    losses = {r: trial(make, r) for r in (rate / 3, rate, 3 * rate)[-TRIES:]}
    print(" " * 11, *(f"{r:.0e}: {loss:.3f}  " for r, loss in losses.items()))

# %% [markdown]
# In our record of the full run, the loss falls from 3.526 to 3.345 (AdamW and 8-bit AdamW), 3.347 (Lion), 3.350
# (Muon) and 3.384 (Adafactor and momentum). On our CPU a step of Muon takes 96 times as long as AdamW's.
#
# | optimizer | its update | wrong choice where |
# |---|---|---|
# | momentum | a mean of gradients | gradients differ much in size, as in a Transformer |
# | 8-bit AdamW | AdamW's, rounded | tensors are small: below 4,096 numbers it saves nothing |
# | Adafactor | scaled by rows and columns | its temporaries are the peak, as with transformers' Adafactor in lesson 05 |
# | Lion | a sign | batches are small: a noisy sign moves as far as a sure one |
# | Muon | all directions alike | batches are small: its products cost as much as training on {{round(30
# * sum(10 * min(p.shape) ** 2 * (2 * max(p.shape) + min(p.shape)) for p in matrices[-7:]) / (6
# * model.num_parameters()), -2):,.0f}} tokens of SmolLM2 |
#
# ## 5 · Gradients that do not wait
#
# In float32, gradients add 4 bytes a weight. With `Recipe(in_backward=True)` (lesson 05) a hook steps a parameter
# as soon as its gradient is complete, and frees the gradient. At most the largest gradient exists: on the tiny Llama,
# {{max(p.nbytes for p in models.tiny_llama().parameters()) / 1e6:.1f}} of
# {{sum(p.nbytes for p in models.tiny_llama().parameters()) / 1e6:.1f}} MB. Whatever needs *all* gradients at once breaks:
#
# - **accumulation**, which adds them up over micro-batches;
# - a **scaler** (lesson 07), which looks at all of them before any step;
# - **clipping**, which divides by the norm of the whole gradient.
#
# `Recipe` refuses the first two. `Trainer`'s layer-wise optimizers refuse accumulation, and leave no gradient to
# clip. Clipping can work with a second backward: see the optional section.
#
# ## 6 · Adapters
#
# Lesson 05 used LoRA. Write it:
#
# $$\text{output} = W x + \frac{\alpha}{r}\, B\,(A\,x)$$

# %% [markdown]
# ### Exercise 9.5 · LoRA from its formula
#
# ●●○ · 4 minutes · trains: what trains, where it starts, and what the first step moves
#
# Write the module `LoRA(base, rank, alpha)` around an `nn.Linear`: its output is base(x) + alpha / rank · B(A(x)). A is
# (rank, in) and starts random, B is (out, rank) and starts at zero. The base is frozen, and A and B are trained. Budget
# for a base of 512 × 512 and rank 8: **1.4 MB**, so B · A must never be written out.
#
# <details><summary>Hint 1: parameters</summary>
#
# `nn.Parameter(tensor)`, put on `self`, is a parameter of the module. `base.requires_grad_(False)` freezes the base.
#
# <details><summary>Hint 2: the product</summary>
#
# `F.linear(x, self.A)` is x times A transposed, (…, rank).
#
# </details></details>


# %%
class LoRA(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        ### BEGIN SOLUTION
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        start = torch.randn(rank, base.in_features).to(base.weight)  # its dtype and device
        self.A = nn.Parameter(start / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank).to(base.weight))
        ### END SOLUTION

    def forward(self, x):
        """x: (..., in). Return (..., out)."""
        raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_09/exercises.py


LoRA = check("9.5", LoRA)

# %% [markdown]
# B starts at zero, so the first output is the base's. A's gradient comes through B, so the first step moves B alone. If
# A started at zero too, nothing would ever move.
#
# Now take Llama-2-7B in bf16, on one row of 2,048 tokens. With every weight trained, its activations are at most
# {{max(every_weight.timeline.by_category["activations"]) / 2**30:.2f}} GiB.

# %%
guess_b = predict_first(
    "9.b", "Llama-2-7B's activations with LoRA of rank 16, at most?", unit="GiB"
)


# %%
def seven(**choice):
    recipe = Recipe("bf16", "adamw-fused", **choice)
    config = known_model("Llama-2-7B")[1]
    return predict(config, batch_size=1, seq_len=2048, recipe=recipe, target="cpu")


every_weight, lora = seven(), seven(lora_rank=16)
rerun = seven(lora_rank=16, checkpointing="per-layer")
chart = Waterfall()
chart.add("every weight", every_weight.peak)
chart.add("LoRA", lora.peak)
chart.add("+ checkpoints", rerun.peak)
most = max(lora.timeline.by_category["activations"]) / 2**30
guess_b.reveal(measured=round(most, 2), what="predicted")
chart

# %% [markdown]
# LoRA removes
# {{sum(max(every_weight.timeline.by_category[part]) - max(lora.timeline.by_category[part])
# for part in ("gradients", "optimizer")) / 2**30:.0f}} GiB of gradients and states, and hardly any activations: backward
# still passes through every layer, to reach the adapters below.
# <!-- holds: 0.9 * max(every_weight.timeline.by_category["activations"]) / 2**30 < most -->
# So the peak falls by less than that: it moves to where the activations are.
# <!-- holds: 0 < every_weight.peak.total - lora.peak.total < 37 * 2**30 and
# lora.peak.by_category["activations"] > every_weight.peak.by_category["activations"] -->
# With every weight trained, checkpoints do not move the peak, which is at the end of backward.
# <!-- holds: abs(seven(checkpointing="per-layer").peak.total / every_weight.peak.total - 1) < 0.001 -->
# With LoRA they take {{100 * (1 - rerun.peak.total / lora.peak.total):.0f}} % off.
# **Adapters make checkpointing matter more.**
#
# These adapters are in bf16. PEFT, Hugging Face's library for adapters, keeps them in float32 by default. Then each
# linear layer also keeps a float32 copy of its input, unless autocast is on.
#
# **Does rank 256 learn nothing more?** Let the numbers of A and B have one size, whatever the rank. The cell prints how
# much they add to W, with α = 32. **rsLoRA** takes the factor α / √r (`use_rslora=True` in PEFT).

# %%
draw, adds = torch.Generator().manual_seed(0), []
for rank in (16, 256):
    A, B = (torch.randn(shape, generator=draw) for shape in ((rank, 512), (512, rank)))
    size = (B @ A).norm() / 1000
    adds.append((32 / rank * size, 32 / rank**0.5 * size))
    print("rank {}: α/r adds {:.1f}, α/√r adds {:.1f}".format(rank, *adds[-1]))

# %% [markdown]
# At sixteen times the rank, α / r adds a quarter as much to W as before, and α / √r as much.
# <!-- holds: abs(adds[1][0] / adds[0][0] - 1 / 4) < 0.02 and abs(adds[1][1] / adds[0][1] - 1) < 0.05 -->
#
# *Where* adapters are is a choice too: on queries and values alone, activations are
# {{max(seven(lora_rank=16, lora_targets=("q_proj", "v_proj")).timeline.by_category["activations"]) / 2**30:.2f}} GiB, since
# fewer layers keep their input.
#
# <details><summary>And DoRA?</summary>
#
# **DoRA** ([Liu et al. 2024](https://arxiv.org/abs/2402.09353)) also trains one number for each output: the length of
# its row of W + BA (`use_dora=True` in PEFT). For these lengths it writes W + BA out in every forward. So it needs
# more temporaries and time.
#
# </details>
#
# **Merging** adds (α / r) B A to W, and the adapter is gone. But in bf16 the sum is rounded (lesson 07):

# %%
base = weight.detach().bfloat16()
merged = (base.float() + 1e-4 * torch.randn(weight.shape)).bfloat16()
print(f"{(merged == base).float().mean():.0%} of the weights stay the same")

# %% [markdown]
# These weights are about {{weight.std():.1f}}, the additions 0.0001. Kept in bf16, most are lost, although they were
# added in float32. <!-- holds: (merged == base).float().mean() > 0.5 --> So keep the merged weights in float32, or do not
# merge. If you do not merge, one base serves **several adapters**: `make_trainer(...).save_model()` writes each to a
# small file, which PEFT loads, and `set_adapter` chooses.
#
# ## 7 · The base in 4 bits
#
# **QLoRA** ([Dettmers et al. 2023](https://arxiv.org/abs/2305.14314)) keeps frozen weights in
# 4 bits: a code of 16 numbers, in blocks of 64. Weights roughly follow a normal distribution, so **NF4** has its
# numbers at that distribution's *quantiles*, closer together where more weights are. (The last
# quantile would be infinite, so bitsandbytes stops at 0.9677083.)


# %%
def quantiles(n):
    return torch.special.ndtri(torch.linspace(0.5, 0.9677083, n))


nf4 = torch.cat([-quantiles(8)[1:].flip(0), quantiles(9)]) / quantiles(9)[-1]
print(nf4.numpy().round(2))
w = weight.detach().flatten()
for name, code in {"equal": torch.linspace(-1, 1, 16), "NF4": nf4}.items():
    error = quantize(w, code, 64)[2] - w
    print(f"{name:<6}error {error.norm() / w.norm():.1%} of a weight")

# %% [markdown]
# NF4's error is smaller. <!-- holds: error.norm() < (quantize(w, torch.linspace(-1, 1, 16), 64)[2] - w).norm() -->
#
# **The bytes.** Half a byte a weight, and a float32 absmax for 64 weights, are 0.5 + 4/64 = 0.5625 bytes. *Double
# quantization* keeps each absmax in one byte, and a float32 for 256 of them: 0.5 + 1/64 + 4/(64 · 256) = 0.5159 bytes.
#
# **The defaults.** `BitsAndBytesConfig(load_in_4bit=True)` means FP4 (4-bit floats), no double quantization and products in float32.
# For the paper's QLoRA, say `bnb_4bit_quant_type="nf4"`, `bnb_4bit_use_double_quant=True`,
# `bnb_4bit_compute_dtype=torch.bfloat16`. The paper's third part is a **paged optimizer**
# (`optim="paged_adamw_8bit"` in `Trainer`): CUDA may move the states of large tensors to the host when the card is
# full, and back when the step needs them. So a short peak costs time instead of an error.
#
# **What is written out.** QLoRA does not multiply in 4 bits. Forward writes a matrix out in bf16, multiplies, and frees
# it. Backward writes it out again. The opening's `multiply` is plain autograd, which saves the matrix for the
# gradient of x. So all matrices in bf16 wait for backward: they are the activations that grew. A function of its own
# (lesson 04) saves neither the matrix nor x:

# %%
grown.add("repaired", peak(1024, quantized_base=True))
grown

# %% [markdown]
# Now 4 bits save memory. <!-- holds: grown.bars[2].total < grown.bars[0].total --> (An optional section has a second
# mistake of this kind.)
#
# PEFT's `prepare_model_for_kbit_training` also adds bytes: it casts all other 16-bit weights to float32, head and
# embedding too. In Llama-3-8B these two grow by
# {{2 * 2 * known_model("Llama-3-8B")[1].vocab_size * known_model("Llama-3-8B")[1].hidden_size / 2**30:.2f}} GiB, and many
# activations double.
#
# Even a good QLoRA is the wrong choice where weights are a small part of the peak: it rounds the base, and takes
# time.
#
# ## 8 · The loss
#
# With weights in 4 bits and checkpoints, SmolLM2's logits and their gradients are the largest part (8 rows of 128
# tokens). <!-- holds: 2 * 4 * 8 * 128 * small.vocab_size == max(smollm2_peak(30, Recipe("bf16", "adamw-8bit",
# checkpointing="per-layer", lora_rank=16, quantized_base=True)).by_category.values()) -->
# In a 7B model, on a row of 2,048 tokens, the weights are larger than both together.
# <!-- holds: seven(lora_rank=16, quantized_base=True, checkpointing="per-layer").peak.by_category["parameters"]
# > 2 * 4 * 2048 * 32000 --> Lesson 05's loss in chunks takes the logits away:
# `Recipe(chunked_loss=True)`. An optional section writes such a loss.
#
# ## 9 · Under 300 MiB
#
# Now combine everything, on models like SmolLM2 with as many layers as you choose.

# %% [markdown]
# ### Exercise 9.8 · SmolLM2's task under 300 MiB
#
# ●●● · 4 minutes · trains: choosing by the parts of the peak, twice on the same card
#
# The batch is 8 rows of 128 tokens, and the card has **300 MiB**. Write `under_300()`, which returns two pairs `(layers,
# Recipe)`: at least 12 layers with **every weight** trained, and at least 40 with **adapters** of rank 16 on every linear
# layer. `smollm2_peak(layers, recipe)` predicts a peak.
#
# <details><summary>Hint 1: every weight</summary>
#
# `print(smollm2_peak(12, recipe).by_category)`. Which part is the largest? Each of the lesson's parts takes one away:
# states, gradients that wait, logits, activations.
#
# <details><summary>Hint 2: adapters</summary>
#
# What is frozen needs no gradient and no states. So it need not be exact either.
#
# <details><summary>Hint 3: names</summary>
#
# `in_backward`, `chunked_loss`, `checkpointing`, `lora_rank`, `quantized_base`; `optimizer="adafactor-torch"`.
#
# </details></details></details>


# %%
def under_300():
    ### BEGIN SOLUTION
    small = {"precision": "bf16", "checkpointing": "per-layer", "chunked_loss": True}
    every_weight = Recipe(optimizer="adafactor-torch", in_backward=True, **small)
    adapters = Recipe(optimizer="adamw-8bit", lora_rank=16, quantized_base=True, **small)
    return (12, every_weight), (40, adapters)
    ### END SOLUTION


under_300 = check("9.8", under_300)

# %%
chart = Waterfall(budget="300 MiB", title="SmolLM2's task")
for layers, recipe in under_300():
    chart.add(f"{layers} layers", smollm2_peak(layers, recipe), aside=True)
chart

# %% [markdown]
# With every weight, the embedding and twelve layers are
# {{smollm2_peak(*under_300()[0]).by_category["parameters"] / 2**20:.0f}} MiB. Backward ends with three tables of the
# embedding's size, {{small.vocab_size * small.hidden_size * 2 / 2**20:.0f}} MiB each: a gradient, an activation and a
# temporary. <!-- holds: all(round(smollm2_peak(*under_300()[0]).by_category[part] / 2**20) == 54
# for part in ("gradients", "activations", "temporaries")) -->
# Thirteen layers do not fit. <!-- holds: smollm2_peak(13, under_300()[0][1]).total > 300 * 2**20 >=
# max(smollm2_peak(*pair).total for pair in under_300()) -->
# With adapters, the weights of 40 layers are hardly larger, and the peak is in forward.
# <!-- holds: smollm2_peak(*under_300()[1]).phase == "forward" and
# smollm2_peak(*under_300()[1]).by_category["parameters"] / 2**20 < 1.05 * 135 -->
#
# And lesson 07's 13B, which did not fit on a card of 80 GB? By these recipes it takes
# {{predict(known_model("Llama-2-13B")[1], batch_size=1, seq_len=2048, recipe=under_300()[0][1],
# target="cuda").peak.total / 2**30:.0f}} GiB with every weight trained, and
# {{predict(known_model("Llama-2-13B")[1], batch_size=1, seq_len=2048, recipe=under_300()[1][1],
# target="cuda").peak.total / 2**30:.0f}} with adapters.
#
# ## 10 · What you can now do
#
# - **An optimizer has two bills**, states and temporaries.
# - **8-bit states need blocks, and a code that is finer towards 0**.
# - **A step in backward** frees gradients. Whatever needs all of them breaks.
# - **Adapters save states and gradients, but few activations.** So checkpoints matter more.
# - **4 bits are how QLoRA keeps a weight.** It multiplies in 16 bits.
#
# ## Optional: a puzzle of adapters
#
# Adapters of rank 16 on all layers of SmolLM2, with 8-bit AdamW in bf16, on 8 rows of 128 tokens and a card of 300 MiB.
# Exercise 9.8 made such a run small. Now make it fast, too. A puzzle has two targets: bytes, and a price in time, which is
# counted. Here it is the calls of the 30 layers: each micro-batch calls a layer once, and a checkpoint once more.
#
# ### Exercise 9.10 · adapters, small and fast
#
# ●●○ · 5 minutes · optional · trains: which of QLoRA's parts a card can do without
#
# Write a dict with some of the options `quantized_base`, `chunked_loss`, `accumulation` and `checkpointing`
# (`"per-layer"`, or `"first-8"` for the first 8 layers). The predicted peak may be **300 MiB**, and the update may take **60
# calls** of layers. Fewer are possible.
#
# <details><summary>Hint 1: what cannot change with the rows</summary>
#
# `print(smollm2_peak(30, Recipe(...)).by_category)`. The weights in bf16 leave too little of the card. Which option makes
# them smaller, and does not call a layer again?
#
# <details><summary>Hint 2: what is left over</summary>
#
# With a checkpoint on each layer, part of the card stays free. Which layers need not run again?
#
# </details></details>

# %%
from gradmem_lib.course import ADAPTERS

way = dict(quantized_base=True, chunked_loss=True, checkpointing="first-26")  # SOLUTION
check("9.10", way)
ADAPTERS.show(way)

# %% [markdown]
# ## Optional: clipping where no gradient waits
#
# ### Exercise 9.4 · clipping where no gradient waits
#
# ●●● · 6 minutes · optional · trains: steps in backward, and what the whole norm costs where gradients are freed
#
# The whole norm is known when backward has ended, and by then the gradients are freed. So run backward **twice**: the
# first pass measures the norm, and the second one steps. Write `clip_in_backward(model, loss_of, lr, max_norm)`:
# `loss_of(model)` makes the loss, as often as you call it. Each trained parameter takes one step of plain gradient
# descent by its gradient times min(1, max_norm / norm). Return the norm. Leave no hook and no gradient. The budget is
# **3.2 MB**. The weights are 2.1 MB, and all gradients 1.8 MB.
#
# <details><summary>Hint 1: the first pass</summary>
#
# Its hook adds `p.grad.square().sum().item()` to a list, and sets `p.grad = None`. The norm is the root of the sum.
#
# <details><summary>Hint 2: hooks</summary>
#
# `handle = p.register_post_accumulate_grad_hook(f)` is for parameters that require a gradient. `handle.remove()` takes
# the hook off.
#
# <details><summary>Hint 3: the second pass</summary>
#
# Under `torch.no_grad()`: `p.add_(p.grad, alpha=-lr * factor)`, then `p.grad = None`.
#
# </details></details></details>


# %%
def clip_in_backward(model, loss_of, lr, max_norm):
    ### BEGIN SOLUTION
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
    [handle.remove() for handle in handles]
    return norm
    ### END SOLUTION


# %%
clip_in_backward = check("9.4", clip_in_backward)

# %% [markdown]
# The price is a second forward and backward. Clipping each parameter by its *own* norm needs one pass, but changes the
# update's direction.
#
# ## Optional: a QLoRA that needs more than LoRA
#
# The opening's run keeps each matrix. And until
# [July 2024](https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1270) bitsandbytes kept the input x, which a
# frozen layer does not need. Such mistakes can make QLoRA need *more* than LoRA
# ([litgpt#1112](https://github.com/Lightning-AI/litgpt/issues/1112)). Here is the second one:


# %%
class KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return F.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx, d_y):
        return None, d_y @ ctx.layer.dequantized(d_y.dtype)


# %% [markdown]
# SmolLM2 has {{sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2):,}} weights in 4 bits. With
# adapters on queries and values, `KeepsInput` keeps two bf16 tensors more in each of the {{small.num_hidden_layers}}
# layers: the MLP's input, {{small.hidden_size}} numbers a token, and `down_proj`'s, {{small.intermediate_size:,}}.
# <!-- holds: abs(formula / turn - 1) < 0.001 -->

# %%
question = "From how many tokens on does this QLoRA need more than LoRA?"
guess_c = predict_first("9.c", question, unit="tokens")

# %%
print("tokens    LoRA   QLoRA   keeps input   keeps matrix   (MiB)")
over = []
for tokens in (1024, 2048):
    ways = [peak(tokens)]
    for forward in (None, KeepsInput.apply, multiply):
        ways.append(peak(tokens, forward, quantized_base=True))
    ways = [each.total / 2**20 for each in ways]
    over.append(ways[2] - ways[0])
    print("{:>6}{:>8,.0f}{:>8,.0f}{:>14,.0f}{:>15,.0f}".format(tokens, *ways))
turn = 1024 - 1024 * over[0] / (over[1] - over[0])
formula = 106_168_320 * (2 - 0.5159) / (30 * 2 * (576 + 1536))
guess_c.reveal(formula=round(formula), measured=round(turn), what="predicted")

# %% [markdown]
# QLoRA saves {{ways[0] - ways[1]:.0f}} MiB at any length, and the inputs kept for nothing grow with the tokens. With kept
# matrices, QLoRA needs more than LoRA at both lengths.
#
# ## Optional: checkpoints behind a frozen embedding
#
# Adapters freeze the embedding, so the first layer's input needs no gradient. `enable_input_require_grads()` makes it need
# one. Do checkpoints need this call?

# %%
claims.show("C44")

# %% [markdown]
# transformers 5.24 calls it for you when you switch checkpoints on.
#
# ## Optional: a loss in chunks, by hand
#
# ### Exercise 9.7 · a loss in chunks
#
# ●●● · 5 minutes · optional · trains: a gradient made on the way forward, so that the logits need not come back
#
# Write `ChunkedLoss.apply(hidden, weight, labels, cap)`: the mean cross-entropy of the logits cap · tanh(z / cap),
# where z = hidden · weightᵀ. Labels of -100 are ignored. Take some rows of `hidden` at a time, at least 10: with single
# rows, the check takes too long. Forward makes the loss, and the gradients of `hidden` and `weight` too. The budget is
# **8 MB**. The logits alone are 12 MB. `summed_loss` is for one chunk.
#
# <details><summary>Hint 1: the gradients of a chunk</summary>
#
# Let autograd make them. `hidden.detach().requires_grad_()` and the same of `weight` collect gradients of their own in
# `.grad`. Compute a chunk's loss under `torch.enable_grad()`, since forward runs without it, and call `backward()`.
#
# <details><summary>Hint 2: the mean</summary>
#
# Count the labels of all chunks first. `summed_loss` is a chunk's sum. Divide it by this count.
#
# <details><summary>Hint 3: backward</summary>
#
# It gets the gradient of the loss, a number. Multiply both gradients by it. Return `None` for `labels` and `cap`.
#
# </details></details></details>


# %%
def summed_loss(rows, weight, labels, cap):
    logits = cap * torch.tanh(rows @ weight.T / cap)
    return F.cross_entropy(logits, labels, reduction="sum")


# %%
class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, cap):
        ### BEGIN SOLUTION
        total, count = 0.0, (labels != -100).sum()
        hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
        for i in range(0, len(hidden), 64):
            with torch.enable_grad():
                loss = summed_loss(hidden[i : i + 64], weight, labels[i : i + 64], cap)
                (loss / count).backward()
            total += loss.detach() / count
        ctx.save_for_backward(hidden.grad, weight.grad)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, d_loss):
        ### BEGIN SOLUTION
        return *(gradient * d_loss for gradient in ctx.saved_tensors), None, None
        ### END SOLUTION


# %%
ChunkedLoss = check("9.7", ChunkedLoss)

# %% [markdown]
# After forward, no logits are left, only two gradients. Backward multiplies them by a number. PyTorch 2.13 has
# `F.linear_cross_entropy` ("theirs"). Does it do the same?

# %%
hidden = torch.randn(512, 64, requires_grad=True)
head = torch.zeros(8192, 64, requires_grad=True)
given = hidden, head, torch.randint(0, 8192, (512,))
losses = {"logits at once": lambda: F.cross_entropy(hidden @ head.T, given[2])}
losses["yours"] = lambda: ChunkedLoss.apply(*given, 30.0)
if hasattr(F, "linear_cross_entropy"):
    losses["theirs"] = partial(F.linear_cross_entropy, *given)
    options = nn.LinearCrossEntropyOptions()
    losses["with options"] = partial(losses["theirs"], options=options)
for name, loss_of in losses.items():
    hidden.grad = head.grad = None
    with MemoryTracker(live=False) as tracker:
        loss_of().backward()
    print(f"{name:<15}{tracker.peak.total:>12,} bytes")

# %% [markdown]
# Theirs saves nothing without options. With options, its chunks are inside one operator, where the tracker cannot see
# them. Theirs knows no caps; `Recipe(chunked_loss=True)` takes the cap that the model has. The
# library [Liger](https://arxiv.org/abs/2410.10989) writes a chunk's gradient over its logits, so one table is enough,
# and it takes caps.
#
# ## Optional: GaLore
#
# **GaLore** ([Zhao et al. 2024](https://arxiv.org/abs/2403.03507)) runs Adam on a smaller matrix. Take a gradient G
# of {{gradient.shape[0]}} rows and {{gradient.shape[1]:,}} columns. Let the columns of a matrix P be the r directions
# in which G is largest. Then PᵀG has r rows instead of 576, and Adam's two moments are as small. The step is P times Adam's update. P is renewed every
# few hundred steps. With r = 64, P and both moments together are
# {{2 * gradient.numel() / (64 * (576 + 2 * 1536)):.1f}} times smaller than AdamW's moments.
#
# What is lost is all that G has in other directions. How much does P keep?

# %% tags=["nbval-ignore-output"]
from gradmem_lib.course import adam_update

U = torch.linalg.svd(gradient, full_matrices=False).U
for rank in (4, 16, 64):
    kept = (U[:, :rank].T @ gradient).norm() / gradient.norm()
    print(f"rank {rank}: {kept:.0%} of the gradient")

# %% [markdown]
# The cell has few tokens, and G has at most as many directions as there are tokens. With more tokens, the first four
# directions keep less. G itself stays large, so GaLore steps in backward (`optim="galore_adamw_layerwise"` in `Trainer`,
# for one process). `Trainer` needs `galore_torch` for it, and the layers by name in `optim_target_modules`. Its rank is
# 128 and P lasts 200 steps, unless `optim_args` says otherwise. All other weights keep AdamW's whole states.
#
# ### Exercise 9.9 · GaLore: moments of a small gradient
#
# ●●● · 6 minutes · optional · trains: a projection, and the bytes of the states behind it
#
# Write `galore_step`, one step on a matrix `p` in place, which only reads G. P is for the *shorter* side: (rows, rank) if
# `p` is wide, with PᵀG as the small gradient, and (columns, rank) if it is tall, with GP. The first call makes P, which
# lasts for `every` calls. The call after these makes a new P, and keeps the moments. Subtract lr · scale · the update,
# mapped back. The only tensors in `state` are P and two moments.
#
# <details><summary>Hint 1: the directions</summary>
#
# `U, _, Vh = torch.linalg.svd(G, full_matrices=False)`. The columns of U and the rows of Vh are sorted, largest first.
#
# <details><summary>Hint 2: too many bytes</summary>
#
# `U[:, :rank]` is a view, and a view keeps the whole U. `.clone()` it.
#
# <details><summary>Hint 3: back</summary>
#
# Wide: `P @ update`. Tall: `update @ P.T`. All of it under `torch.no_grad()`.
#
# </details></details></details>


# %%
@torch.no_grad()
def galore_step(p, state, rank, every, lr, scale):
    """p: (rows, columns), with a gradient G. state: p's own dict, empty at first.

    adam_update(small, state) returns Adam's update for a small gradient, and keeps both moments in state.
    """
    ### BEGIN SOLUTION
    G, wide = p.grad, p.shape[0] <= p.shape[1]
    call = state["call"] = state.get("call", -1) + 1
    if call % every == 0:
        U, _, Vh = torch.linalg.svd(G, full_matrices=False)
        state["P"] = (U[:, :rank] if wide else Vh[:rank].T).clone()
    P = state["P"]
    small = P.T @ G if wide else G @ P
    update = adam_update(small, state)
    p -= lr * scale * (P @ update if wide else update @ P.T)
    ### END SOLUTION


galore_step = check("9.9", galore_step)

# %% [markdown]
# ## Optional: more practice

# %% [markdown]
# ### Exercise 9.2 · a second moment from row and column sums
#
# ●●○ · 4 minutes · optional · trains: two vectors in place of a matrix, and what they can say of it
#
# Write `adafactor_second_moment(grad, row, column, beta2, eps)` for a matrix `grad`. Square it and add `eps`. `row`
# and `column` keep moving averages of its row and column sums, with `beta2` and in place. Return v: the product of
# row sum and column sum, divided by the sum of everything.
#
# <details><summary>Hint 1: sums</summary>
#
# The sum of each row goes along the last dimension, `squares.sum(1)`.
#
# <details><summary>Hint 2: the averages</summary>
#
# `row.lerp_(sums, 1 - beta2)` is `row = beta2 * row + (1 - beta2) * sums`, in place.
#
# <details><summary>Hint 3: v</summary>
#
# `torch.outer(row, column) / row.sum()`
#
# </details></details></details>


# %%
def adafactor_second_moment(grad, row, column, beta2, eps):
    """grad: (rows, columns). Return v, of the same shape."""
    ### BEGIN SOLUTION
    squares = grad.square() + eps
    row.lerp_(squares.sum(1), 1 - beta2)
    column.lerp_(squares.sum(0), 1 - beta2)
    return torch.outer(row, column) / row.sum()
    ### END SOLUTION


adafactor_second_moment = check("9.2", adafactor_second_moment)

# %% [markdown]
# ### Exercise 9.6 · the bytes of NF4
#
# ●○○ · 3 minutes · optional · trains: adding up what a quantized matrix keeps beside its 4 bits
#
# Write `nf4_bytes(numbers, block, group)` with double quantization. Two numbers share a byte. Each `block` of numbers
# has its absmax as one byte, and each `group` of these a float32 scale. One float32 more is the mean of all absmax
# values.
#
# <details><summary>Hint: round up</summary>
#
# `-(-a // b)` is a / b, rounded up.
#
# </details>


# %%
def nf4_bytes(numbers, block, group):
    """A last block or group may be incomplete."""
    ### BEGIN SOLUTION
    blocks = -(-numbers // block)
    return -(-numbers // 2) + blocks + 4 * -(-blocks // group) + 4
    ### END SOLUTION


nf4_bytes = check("9.6", nf4_bytes)
