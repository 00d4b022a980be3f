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
# # 06 · Before you rent the card
#
# *60 minutes. You need: lessons 01, 03 and 04, and 05 for the techniques.*
#
# You have a model, a run that fails or one that you have not begun, and a card that somebody has to pay for.

# %%
import torch

from gradmem_lib import (
    MemoryTracker,
    Recipe,
    accounting,
    check,
    plan,
    predict,
    predict_first,
)
from gradmem_lib.course import claims, models, texts

# %%
smol, tokenizer = models.smollm2()
smol_optimizer = torch.optim.AdamW(smol.parameters(), lr=1e-5, foreach=False)
shape = accounting.SHAPES["SmolLM2-135M"]


def step(model, optimizer, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# %% [markdown]
# ## 1 · Predict SmolLM2's peak, then run it
#
# You now have a formula for every term of the sum. But a formula leaves out what its author did not think of. There is
# another way to know beforehand: **run the step without the memory.** `predict` runs the same training step on *fake
# tensors*. They have a shape and a dtype and no bytes behind them, and the tracker counts them like real ones. If many
# layers are alike, `predict` traces only a few of them, so a 7B model takes no longer than a small one.
#
# One thing changes since section 2: SmolLM2 now uses eager attention, over one longer sequence.

# %%
guess_b = predict_first(
    "6.b",
    "SmolLM2 as in section 2 (float32, AdamW), but 1 × 384 tokens and eager attention: the peak?",
)

# %%


sizes = {"batch_size": 1, "seq_len": 384}
formula = accounting.estimate(shape, **sizes, precision="float32", attention="eager")
recipe = Recipe(precision="float32", optimizer="adamw", attention="eager")
predicted = predict(smol.config, **sizes, recipe=recipe, target="cpu")
print("layers traced:", predicted.traced_layers, "of", smol.config.num_hidden_layers)

# %% [markdown]
# The prediction is made, and SmolLM2 has not been touched: `predict` received only its config. Now run the step itself,
# with every byte of it:

# %%
smol.set_attn_implementation("eager")
smol_ids = texts.batch(tokenizer, **sizes)
with MemoryTracker(
    smol, smol_optimizer, title="SmolLM2-135M, eager attention, 1 × 384 tokens"
) as tracker:
    step(smol, smol_optimizer, smol_ids)

# %%
guess_b.reveal(formula=formula.total, measured=tracker.peak.total)
print(f"\n{'at the peak':<14}{'formula':>15}{'predicted':>15}{'measured':>15}")
columns = formula.by_category, predicted.peak.by_category, tracker.peak.by_category
for name in tracker.peak.by_category:
    print(f"{name:<14}" + "".join(f"{column[name]:>15,}" for column in columns))
totals = formula.total, predicted.peak.total, tracker.peak.total
print(f"{'total':<14}" + "".join(f"{total:>15,}" for total in totals))
print(f"the prediction is {abs(predicted.peak.total - tracker.peak.total):,} bytes off")

# %% [markdown]
# The prediction is right to the byte, line by line. The formula is a little off, and someone had to *write* it, for
# Llama and GPT-2, who knew where the peaks would be. The prediction knew nothing beforehand: it ran the program.
#
# ### What the popular formulas say
#
# Now you can test the rules that everyone quotes:
#
# - **16 bytes a parameter** (Rajbhandari et al. 2020): weights, gradients and Adam in mixed precision. Tokens play no
#   part.
# - **states only**: weights, gradients and Adam in the bytes that the recipe really uses.
# - **34·s·b·h a layer** (Korthikanti et al. 2022): the activations of a GPT layer in 16 bits, for sequence *s*, batch
#   *b* and hidden size *h*. Eager attention with *a* heads adds **5·a·s²·b**. We add them to the states.


# %%
def popular(shape, b, s):
    states = sum(accounting.resident_bytes(shape, precision="bf16").values())
    layer = 34 * s * b * shape.hidden
    scores = 5 * shape.heads * s**2 * b
    return {
        "16 bytes a parameter": 16 * shape.parameters,
        "states only": states,
        "states + 34·s·b·h": states + shape.layers * layer,
        "states + 34·s·b·h + 5·a·s²·b": states + shape.layers * (layer + scores),
    }


# %%
def compare(shape, config, b, s):
    for attention in ("fused", "eager"):
        recipe = Recipe(precision="bf16", attention=attention)
        sizes = {"batch_size": b, "seq_len": s}
        exact = predict(config, **sizes, recipe=recipe, target="cpu").peak
        ours = accounting.estimate(shape, **sizes, attention=attention).total
        print(f"{shape.name}, bf16, {b} × {s} tokens, {attention} attention:")
        print(f"  {'exact: peak in ' + exact.phase:<32}{exact.total:>16,}")
        rows = popular(shape, b, s) | {"this lesson's closed form": ours}
        for name, nbytes in rows.items():
            print(f"  {name:<32}{nbytes:>16,}{nbytes / exact.total - 1:>+9.1%}")


# %%
compare(shape, smol.config, 8, 1024)

# %%
from transformers import LlamaConfig

seven = accounting.SHAPES["Llama-2-7B"]
seven_config = LlamaConfig()  # its defaults are the sizes of Llama-2-7B
print(accounting.Shape.from_config(seven_config, seven.name) == seven)
compare(seven, seven_config, 1, 2048)

# %% [markdown]
# For the 7B model on one sequence with fused attention, "states only" looks good: the peak is in the optimizer's step,
# where no activation is left. The small model on many tokens shows that a rule without tokens cannot see them.
# Korthikanti's 34 was counted for GPT layers with dropout, an MLP of four times the hidden size, and models of 22
# billion parameters and more. Their logits are a small part. In SmolLM2 they are the largest layer. And a sum of all
# states and all activations counts gradients that have not arrived yet. **A rule of thumb is right for the model it was
# made for.**

# %% [markdown]
# ## 2 · Explore
#
# Here you can change a prediction with controls. While you move a control, the closed forms of this lesson answer. When
# you stop, the exact trace takes their place and says how far off they were. It counts as PyTorch's allocator does on a
# CUDA card, by PyTorch's sources. Nothing here was measured on a card. The dashed line is the card's room for tensors,
# because the driver, cuBLAS and the allocator take the rest. The verdict above the bar counts them too. Try to answer
# before you move a control:
#
# - Which model is the largest that trains in pure bf16 on a 24 GB card, at 1 × 512 tokens?
# - With SmolLM2 and eager attention: at which sequence length do the activations overtake everything else?
# - Llama-3.2-1B at 8 × 1024 in bf16: what is the largest part of the bar, and which section of this lesson was about
#   it?

# %%
from gradmem_lib import explore

explore()

# %% [markdown]
# ## 3 · The same for a 7B
#
# No card was at hand when this was written. Everything in this section is **predicted**: Llama-2-7B, rows of 2,048
# tokens, 8 of them an update. You have seen on a small model what each technique works on, so begin with the answer,
# the recipe. The planner judges it.

# %%
from gradmem_lib import find_card
from gradmem_lib.course import lesson_06

# %% [markdown]
# ### Exercise 6.5 · a 7B on a card of 24 GB
#
# ●●● · 10 minutes · trains: finding what stands in the way, and the one change that moves it
#
# Llama-2-7B, rows of 2,048 tokens, 8 rows an update, an RTX 4090. Write `recipe_7b()`, which returns a `Recipe` and the
# rows of a micro-batch; every layer has to learn something. `on_card(recipe, micro_batch)` says what `plan` would say:
# print its `why_not()`, which names what stands in the way, and change one thing at a time. There is more than one way.
#
# <details><summary>Hint 1: before any prediction</summary>
#
# 6,738,415,616 weights. How many GiB in float32, in bf16? And as many gradients?
#
# <details><summary>Hint 2: two ways out</summary>
#
# Either few weights are trained (`lora_rank`), or no gradient waits (`in_backward`, with an optimizer that keeps next
# to nothing; then accumulation is not possible, and 8 rows go at once).
#
# <details><summary>Hint 3: what is left</summary>
#
# Activations: `checkpointing="per-layer"`. Logits: `chunked_loss=True`. Rows: `accumulation`.
#
# </details></details></details>


# %%
def recipe_7b():
    """(Recipe, rows of a micro-batch). Recipe's fields: help(Recipe)."""
    ### BEGIN SOLUTION
    recipe = Recipe(
        precision="bf16",
        optimizer="adamw-fused",
        lora_rank=16,
        checkpointing="per-layer",
        accumulation=8,
    )
    return recipe, 1
    ### END SOLUTION


recipe_7b = check("6.5", recipe_7b)

# %%
recipe_of_mine, micro_batch = recipe_7b()
option = lesson_06.on_card(recipe_of_mine, micro_batch)
print(option)
needs, spare = option.needs / 2**30, option.spare / 2**30
print(f"needs {needs:.1f} GiB, and leaves {spare:.1f} of the card")

# %% [markdown]
# Now take the long way, technique by technique. Beside the peak of live bytes, the next tables show what the run needs
# on a card, with the driver's context and a rough share for the allocator.

# %%
ladder = {
    "bf16=True": {"precision": "autocast-bf16"},
    "all in bf16": {"precision": "bf16"},
    "+ 8 × 1": {"accumulation": 8},
    "+ checkpointing": {"checkpointing": "per-layer"},
    "+ 8-bit AdamW": {"optimizer": "adamw-8bit"},
    "+ LoRA, rank 16": {"lora_rank": 16},
    "+ loss in chunks": {"chunked_loss": True},
    "+ base in 4 bits": {"quantized_base": True},
}

# %%
question = "A 7B in bf16, cut into 8 × 1, checkpointed, AdamW: its peak in GiB?"
guess_d = predict_first("6.d", question, unit="GiB")

# %%
changes, on_card = {"optimizer": "adamw-fused"}, {}
print(f"{'GiB':<18}{'peak':>7}{'needs':>7}   most of it")
for name, change in ladder.items():
    changes |= change
    option = lesson_06.on_card(Recipe(**changes), 8 // changes.get("accumulation", 1))
    on_card[name], peak = option, option.prediction.peak
    most = sorted(peak.by_category.items(), key=lambda item: -item[1])[:3]
    held = ", ".join(f"{part} {n / 2**30:.1f}" for part, n in most)
    print(f"{name:<18}{peak.total / 2**30:>7.1f}{option.needs / 2**30:>7.1f}   {held}")

# %%
peak = on_card["+ checkpointing"].prediction.peak.total
guess_d.reveal(measured=round(peak / 2**30, 1), what="predicted")
claims.show("C12", "C54")

# %% [markdown]
# In full fine-tuning accumulation cannot be the answer: it *keeps* the gradients, and in bf16 weights and gradients are
# 25 GiB before the first token. What fits has either few gradients (LoRA) or no waiting ones (a step in backward). The
# prices:
#
# | technique | its price |
# |---|---|
# | accumulation | the gradients stay; time, where a micro-batch is too small for the card |
# | checkpointing | up to a third more work, up to half more with frozen weights; measure the time |
# | bf16 throughout | small updates are rounded away |
# | 8-bit AdamW, Adafactor | approximate moments, or fewer of them; another learning rate |
# | a step in backward | no accumulation, no clipping of the whole gradient |
# | LoRA | a smaller space to learn in |
# | a base in 4 bits | a rounded model, and time to write its weights out |
#
# On which cards does each of them fit? The next table has a star where it does:

# %%
cards = ("RTX 3070 8GB", "RTX 3060 12GB", "RTX 4060 Ti 16GB", "RTX 4090 24GB")
backward = {"precision": "bf16", "optimizer": "adafactor-torch", "in_backward": True}
backward |= {"checkpointing": "per-layer", "chunked_loss": True}
on_card["all weights, in backward, 8 rows"] = lesson_06.on_card(Recipe(**backward), 8)
print(
    f"{'':<36}{'needs':>10}  " + "".join(f"{card.rpartition(' ')[2]:>6}" for card in cards)
)
for name, option in on_card.items():
    fits = ["*" if option.needs <= find_card(card).nbytes else "" for card in cards]
    row = f"{name:<36}{option.needs / 2**30:>6.1f} GiB  "
    print(row + "".join(f"{mark:>6}" for mark in fits))

# %% [markdown]
# The last line steps in backward, with torch's Adafactor. The 14.9 GB of C54 are the peak of *one* row. Does it matter
# which Adafactor you take? Llama-3.1-8B has 128,256 words, and two tables of them, embedding and output, of 525 million
# numbers each. The next cell runs two rows at a time:

# %%
from gradmem_lib import known_model

config_8b = known_model("Llama-3.1-8B")[1]
for optimizer in ("adafactor", "adafactor-torch"):
    recipe_8b = Recipe(**backward | {"optimizer": optimizer})
    ask = {"batch_size": 2, "seq_len": 2048, "target": "cuda"}
    peak = predict(config_8b, recipe=recipe_8b, **ask).peak
    most = f"temporaries {peak.by_category['temporaries'] / 2**30:.1f}"
    print(f"{optimizer:<16}peak {peak.total / 2**30:.1f} GiB, {most}, in {peak.phase}")

# %% [markdown]
# Float32 copies of one table are 7.8 GiB, and one copy in bf16 is 1.0. With the second, every weight of the 8B can be
# trained on 24 GB. With the first it cannot.
#
# Now back to the 7B: the two smaller cards need a base in 4 bits (QLoRA). Each frozen weight is then one of 16 values,
# times a scale that its block of 64 weights shares. To multiply, a layer's weights are written out in bf16 and thrown
# away again. A card of 16 GB takes LoRA with or without 4 bits, and with them two thirds of it are left. What would the
# planner do with the room?

# %%
found = plan(
    "Llama-2-7B", card="RTX 4060 Ti 16GB", seq_len=2048, global_batch=8, method="qlora"
)
print(found.best)
print("The next faster one does not fit:", found.next_faster)

# %% [markdown]
# Half of the layers keep their activations and need not run twice. That is the largest step up that fits.
#
# More claims of this kind have been made, for other models and larger cards. Before you look at a verdict, add up
# weights, gradients and states in your head. That decides most of them.

# %%
claims.show("C23", "C25", "C51", "C53", "C55")

# %% [markdown]
# ## 4 · A table from the wild
#
# In 2022 the documentation of transformers fine-tuned BERT-large on a V100 in nine ways, and printed what the card's
# own tool showed. No published table names all of its conditions. Can its figures be *predicted*, four years later and
# without the card? The next table goes row by row, in MiB. It has what a step needs today, then one column for each
# thing that was different, and what is left over.

# %%
from gradmem_lib.course import bert_large

print(bert_large.table())

# %% [markdown]
# The sums come out within one per cent. The step's tensors alone are far off. Context and idle blocks are a good part
# of what the tool shows, and the software of that year kept things that today's does not. Ask of any published figure:
# which versions, and does it count tensors, the allocator, or the whole process?

# %%
claims.show("C13", "C14", "C24")

# %% [markdown]
# ## 5 · What first?

# %%
claims.show("C57", "C58")
