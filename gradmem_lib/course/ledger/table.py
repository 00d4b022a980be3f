"""The claims that the course tests: what five documents say, in our words."""

from __future__ import annotations

import re
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
    """One claim. ``documents``: keys of ``DOCUMENTS``; ``says``: our paraphrase."""

    id: str
    documents: str
    says: str

    @property
    def document(self) -> str:
        """The titles of the documents that make the claim."""
        return "; ".join(DOCUMENTS[key] for key in self.documents)


# The id, the documents that make the claim, and the claim.
_CLAIMS = """
C01 A: A 7B model in mixed precision (FP16) needs 14 GB of parameters, 14 GB of gradients, 56 GB of
    Adam states and, by batch size, 20 to 40 GB of activations: 104 to 124 GB.
C02 A: Adam's two moments must be stored in FP32, even when the model is in FP16.
C03 A: Adam takes 4 times the memory of the gradients.
C04 A: m keeps 90% of its old value and takes 10% of the new gradient; v keeps 99.9% and takes 0.1%
    of the squared gradient.
C05 A: A Sequential of Linear, ReLU, Linear, ReLU, Linear stores 5 intermediate tensors for
    backward.
C06 A: The forward pass is run by calling model.fit().
C07 A: The size of gradients does not depend on the batch; the size of activations grows with batch
    and sequence.
C08 A: Accumulation keeps the gradients small.
C09 B: Accumulation reduces the memory needed to store gradients.
C10 ACD: Dividing each micro-batch's loss by K makes K micro-batches equal to one full batch.
C11 A: fp16=True in the Hugging Face Trainer halves the memory.
C12 A: Micro-batch 1 with 32 accumulation steps, checkpointing and fp16 fine-tunes Llama-2-7B on
    limited hardware.
C13 B: BERT-large at batch 4 takes 57.82 s and 14,949 MB; at batch 1 with 4 accumulation steps 66.03
    s and 8,681 MB.
C14 B: BERT-large at batch 1 with 4 accumulation steps and checkpointing takes 85.47 s and 6,775 MB.
C15 B: Checkpointing slows training down by about 20%.
C16 BCD: Accumulation takes longer for the same number of samples.
C17 B: FSDP with QLoRA fine-tunes a 70B model on two cards of 24 GB.
C18 C: Global batch = mini-batch x accumulation steps x GPUs, and only the mini-batch is in memory.
C19 C: Checkpointing brings activation memory from O(n) to O(sqrt n) in the number of layers.
C20 C: Checkpointing saves about 50 to 80% of activation memory for 20 to 30% more computation.
C21 C: Wrapping each layer in checkpoint or the whole model at once saves the same memory.
C22 C: Going from batch 32 to 4 accumulation steps of 8 cuts memory, O(batch x sequence x hidden),
    by 75%.
C23 C: GPT-2 1.5B at batch 32 x 1024 needs about 60 GB (40 of activations); with checkpointing 32
    GB (12); with 4 x 8 accumulated, too, 22 GB.
C24 C: BERT-large at 16 x 512 needs about 24 GB, at 4 x 4 accumulation steps 8 GB, with
    checkpointing 5 GB.
C25 C: Together, the techniques can train models 4 to 10 times larger.
C26 C: More checkpoints mean more memory and less recomputation; fewer mean less memory and more
    recomputation.
C27 C: A checkpoint every sqrt(n) layers is the best balance.
C28 C: Checkpointing does less for networks of under 10 layers.
C29 C: Accumulation has no computation overhead.
C30 C: Both techniques work with any architecture.
C31 C: The learning rate grows linearly with the batch size.
C32 C: Optimizer states are 2 to 8 times the size of the parameters.
C33 D: A 1.3B model takes 2.6 GB of parameters, 5.2 GB of Adam states and 2.6 GB of gradients:
    about 10.4 GB before activations.
C34 D: 524,288 tokens per update need 64 accumulation steps with micro-batches of 4 x 2048.
C35 D: Log the loss before dividing it, and clear gradients with set_to_none=True.
C36 D: Activations exceed parameters and optimizer states together, often several times, already at
    modest batch sizes.
C37 E: One layer at 2048 tokens, width 4096, batch 8 in bf16 stores 400 MB of queries, keys and
    values, 2 GB of scores and 800 MB of feed-forward: 100 GB over 32 layers.
C38 E: At 8192 tokens (batch 8, 32 heads), the attention scores alone are 8 GB a layer.
C39 E: sqrt(n) memory at 33% extra computation makes sequences twice as long or longer.
C40 E: 32 layers with a checkpoint every 4 are 8 segments and one extra forward pass: 33% more
    computation.
C41 E: Checkpointing every layer leaves about 20% of the memory at 67% of the speed (with mixed
    precision 10% at 60%); every N layers has 75% of the speed.
C42 E: use_reentrant=False is always the right choice; it works through saved-tensor hooks and with
    torch.compile.
C43 E: Checkpointing requires use_cache=False.
C44 E: Adapters with checkpointing require enable_input_require_grads().
C45 E: Checkpointing the attention alone keeps 60 to 80% of the saving for 10 to 15% overhead.
C46 E: gradient_checkpointing_kwargs chooses which modules are checkpointed.
C47 E: The Trainer's experimental gradient_checkpointing="auto" switches checkpointing on only near
    the memory limit.
C48 E: Moving saved activations to the CPU saves 80 to 90% and costs traffic on the bus.
C49 E: FSDP with checkpointing gathers only the shards it needs, and both modes of use_reentrant
    work.
C50 E: For the least memory, segments have N = sqrt(depth) layers: 6 of 32 (about 20%), 10 of 96.
C51 E: A 13B model on a 40 GB A100 peaks at 35 GB without and 15 GB with checkpointing.
C52 E: Attention scores of 4096 tokens at batch 8 take 256 MB a head, 8 GB for 32 heads,
    against 1 GB for the feed-forward part: a ratio of 8 to 1.
C53 E: A 70B model's key-value cache for 2k tokens at batch 32 is about 40 GB, often more than the
    weights.
C54 E: bf16, checkpointing and accumulation together fine-tune a 7B model on one 24 GB card at 2048
    tokens.
C55 E: A 7B Llama at 4096 tokens and batch 1 fits one 80 GB card in bf16 with checkpointing.
C56 E: max_seq_length is an option of TrainingArguments.
C57 E: Turn checkpointing on first, then reduce micro-batches with accumulation.
C58 C: Accumulation is for the batch size, checkpointing for depth and long sequences; mixed
    precision on top saves more.
"""


def _claims() -> dict[str, Claim]:
    found = {}
    for name, documents, says in re.findall(r"^(C\d\d) (\w+): (.+(?:\n .+)*)", _CLAIMS, re.M):
        found[name] = Claim(name, documents, " ".join(says.split()))
    return found


CLAIMS = _claims()
