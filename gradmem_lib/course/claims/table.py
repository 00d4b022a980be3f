"""The claims that the course puts to the test: what five documents say, in our words, and the lesson that answers it."""

from __future__ import annotations

from dataclasses import dataclass

DOCUMENTS = {
    "A": "Basics of Gradient Accumulation and Checkpointing to train LLMs (blog post, 2025)",
    "B": "Gradient Accumulation and Checkpointing (primer, aman.ai)",
    "C": "Gradient Checkpointing vs Gradient Accumulation: Memory Optimization Techniques (guide)",
    "D": "Gradient Accumulation (chapter of a training project's documentation)",
    "E": "Gradient Checkpointing (concept page, Training Tech)",
}


@dataclass(frozen=True)
class Claim:
    """One claim. ``documents``: keys of ``DOCUMENTS``; ``says``: our paraphrase; ``how``: what kind of answer it gets."""

    id: str
    documents: str
    says: str
    lesson: str
    how: str

    @property
    def document(self) -> str:
        """The titles of the documents that make the claim."""
        return "; ".join(DOCUMENTS[key] for key in self.documents)


# id | documents | lesson | how | what is claimed
_ROWS = """
C01 | A | 01 | exact | A 7B model in FP16 needs 14 GB of parameters, 14 GB of gradients, 56 GB of Adam states and 20 to 40 GB of activations: 104 to 124 GB in all.
C02 | A | 01 | code | Adam keeps its two moments in FP32 even when the model is in FP16.
C03 | A | 01 | exact | Adam takes 4 times the memory of the gradients.
C04 | A | 02 | sum | m keeps 90 % of its old value and takes 10 % of the new gradient; v keeps 99.9 % and takes 0.1 % of the squared gradient.
C05 | A | 01 | exact | A Sequential of Linear, ReLU, Linear, ReLU, Linear stores 5 intermediate tensors for backward.
C06 | A | 01 | code | The forward pass is run by calling model.fit().
C07 | A | 01 | exact | The size of gradients does not depend on the batch; the size of activations grows with batch and sequence.
C08 | A | 03 | exact | Accumulation keeps the gradients small.
C09 | B | 03 | exact | Accumulation reduces the memory needed to store gradients.
C10 | ACD | 03 | exact | Dividing each micro-batch's loss by K makes K micro-batches equal to one full batch.
C11 | A | 05, 06 | exact, gpu | fp16=True in the Hugging Face Trainer halves the memory.
C12 | A | 05 | exact | Micro-batch 1 with 32 accumulation steps, checkpointing and fp16 fine-tunes Llama-2-7B on limited hardware.
C13 | B | 05 | exact, gpu | BERT-large at batch 4 takes 57.82 s and 14 949 MB; at batch 1 with 4 accumulation steps 66.03 s and 8 681 MB.
C14 | B | 05 | exact, gpu | The same with checkpointing takes 85.47 s and 6 775 MB.
C15 | B | 04 | measured | Checkpointing slows training down by about 20 %.
C16 | B | 03 | measured | Accumulation takes longer for the same number of samples.
C17 | B | 09 | exact | FSDP with QLoRA fine-tunes a 70B model on two cards of 24 GB.
C18 | C | 03 | exact | Global batch = mini-batch x accumulation steps x GPUs, and only the mini-batch is in memory.
C19 | C | 04 | exact | Checkpointing brings activation memory from O(n) to O(sqrt n) in the number of layers.
C20 | C | 04 | exact, measured | Checkpointing saves 50 to 80 % of activation memory for 20 to 30 % more computation.
C21 | C | 04 | exact | Wrapping each layer in checkpoint, or the whole model at once, are two ways to the same saving.
C22 | C | 03 | exact | Going from batch 32 to 4 accumulation steps of 8 cuts memory by 75 %.
C23 | C | 01, 05 | exact | GPT-2 1.5B at batch 32 x 1024 has about 40 GB of activations, 60 GB in all; 12 and 32 GB with checkpointing; 22 GB with accumulation too.
C24 | C | 05 | exact, gpu | BERT-large at 16 x 512 needs about 24 GB, at 4 x 4 accumulation steps 8 GB, with checkpointing 5 GB.
C25 | C | 05, 10 | exact | Together, the techniques train models 4 to 10 times larger.
C26 | C | 04 | exact | More checkpoints mean more memory and less recomputation; fewer mean less memory and more recomputation.
C27 | C | 04 | exact | A checkpoint every sqrt(n) layers is the best balance.
C28 | C | 04 | exact | Checkpointing does less for networks of under 10 layers.
C29 | C | 03 | measured | Accumulation has no computation overhead.
C30 | C | 03, 04 | exact | Both techniques work with any architecture.
C31 | C | 03 | measured | The learning rate grows linearly with the batch size.
C32 | C | 01 | exact | Optimizer states are 2 to 8 times the size of the parameters.
C33 | D | 01 | exact | A 1.3B model takes 2.6 GB of parameters, 5.2 GB of Adam states and 2.6 GB of gradients: 10.4 GB before activations.
C34 | D | 03 | sum | 524 288 tokens an update at 4 x 2048 a micro-batch are 64 accumulation steps.
C35 | D | 03 | exact | Log the loss before dividing it, and clear gradients with set_to_none=True.
C36 | D | 01 | exact | Activations exceed parameters and optimizer states together, often several times, already at modest batch sizes.
C37 | E | 01 | exact | One layer at 2048 tokens, width 4096, batch 8 in bf16 stores 400 MB of queries, keys and values, 2 GB of scores and 800 MB of feed-forward: 100 GB over 32 layers.
C38 | E | 01, 07 | sum | At 8192 tokens the attention scores alone are 8 GB a layer.
C39 | E | 04 | exact, measured | sqrt(n) memory at 33 % extra computation makes sequences twice as long possible.
C40 | E | 04 | exact | 32 layers with a checkpoint every 4 are 8 segments and one extra forward pass: 33 % more computation.
C41 | E | 04 | exact, measured | Checkpointing every layer leaves 20 % of the memory at 67 % of the speed; every N layers 75 % of the speed; with mixed precision 10 % at 60 %.
C42 | E | 04 | code | use_reentrant=False is always the choice; it works through saved-tensor hooks and with torch.compile.
C43 | E | 05 | code | Checkpointing requires use_cache=False.
C44 | E | 08 | code | Adapters with checkpointing require enable_input_require_grads().
C45 | E | 07 | exact | Checkpointing the attention alone keeps 60 to 80 % of the saving for 10 to 15 % overhead.
C46 | E | 05 | code | gradient_checkpointing_kwargs chooses which modules are checkpointed.
C47 | E | 05 | code | gradient_checkpointing="auto" switches checkpointing on near the memory limit.
C48 | E | 07 | exact, gpu | Moving saved activations to the CPU saves 80 to 90 %, for traffic on the bus.
C49 | E | 09 | exact | FSDP with checkpointing gathers only the shards it needs, and both modes of use_reentrant work.
C50 | E | 04 | exact | N = sqrt(depth): 6 for 32 layers, 10 for 96.
C51 | E | 05 | exact | A 13B model on a 40 GB A100 peaks at 35 GB without and 15 GB with checkpointing.
C52 | E | 01, 07 | exact | Attention over 4096 tokens at batch 8 takes 256 MB a head, 8 GB for 32 heads, against 1 GB for the feed-forward part: a ratio of 8 to 1.
C53 | E | 07 | exact | A 70B model's key-value cache for 2k tokens at batch 32 is about 40 GB, often more than the weights.
C54 | E | 05, 10 | exact, gpu | bf16, checkpointing and accumulation together fine-tune a 7B model on one 24 GB card at 2048 tokens.
C55 | E | 05 | exact, gpu | A 7B Llama at 4096 tokens and batch 1 fits one 80 GB card in bf16 with checkpointing.
C56 | E | 05 | code | max_seq_length is an option of TrainingArguments.
C57 | E | 05 | exact | Turn checkpointing on first, then reduce micro-batches with accumulation.
C58 | C | 05 | exact | Accumulation is for the batch size, checkpointing for depth and long sequences, mixed precision goes on top.
"""


def _read(row: str) -> Claim:
    name, documents, lesson, how, says = (part.strip() for part in row.split(" | "))
    return Claim(name, documents, says, lesson, how)


CLAIMS: dict[str, Claim] = {claim.id: claim for claim in map(_read, _ROWS.strip().splitlines())}
