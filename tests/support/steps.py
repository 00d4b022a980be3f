"""Training steps on small models, for the tests of the tracker."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

LLAMA = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    use_cache=False,
)


BERT = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_dropout_prob=0,
    attention_probs_dropout_prob=0,
)


GPT2 = dict(
    vocab_size=256,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=64,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
)


class Blocks(nn.Module):
    """Blocks in a row, each of which can be checkpointed, and a loss."""

    def __init__(self, blocks, head, checkpointed):
        super().__init__()
        self.blocks, self.head, self.checkpointed = nn.ModuleList(blocks), head, checkpointed

    def forward(self, x, labels):
        for block in self.blocks:
            # nothing here is random, and the tracker cannot see saved random-number states
            x = (
                checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
                if self.checkpointed
                else block(x)
            )
        return F.cross_entropy(self.head(x.flatten(1)).float(), labels)


def conv_net(checkpointed):
    blocks = [
        nn.Sequential(
            nn.Conv2d(c, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
        )
        for c in (3, 32, 32)
    ]
    return Blocks(blocks, nn.Linear(32 * 16 * 16, 10), checkpointed)


def mlp(checkpointed):
    blocks = [
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
    ]
    return Blocks(blocks, nn.Linear(256, 10), checkpointed)


def hf(model_class, config_class, config, **more):
    def build(checkpointed):
        model = model_class(config_class(**config, **more))
        if checkpointed:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return model

    return build


MODELS = {
    "llama": hf(LlamaForCausalLM, LlamaConfig, LLAMA),
    "llama_gqa": hf(LlamaForCausalLM, LlamaConfig, LLAMA, num_key_value_heads=2),
    "llama_tied": hf(LlamaForCausalLM, LlamaConfig, LLAMA, tie_word_embeddings=True),
    "gpt2": hf(GPT2LMHeadModel, GPT2Config, GPT2, use_cache=False, bos_token_id=0, eos_token_id=0),
    "bert": hf(BertForMaskedLM, BertConfig, BERT),
    "cnn": conv_net,
    "mlp": mlp,
}


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=False),
}


def build(name, *, precision="float32", checkpointed=False, optimizer="adamw", seq_len=48):
    """A model, its optimizer, a batch, and one training step on it."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = MODELS[name](checkpointed).to(dtype).train()
    opt = OPTIMIZERS[optimizer](model.parameters())
    if name in ("cnn", "mlp"):
        x = (
            torch.randn(32, 3, 16, 16, dtype=dtype)
            if name == "cnn"
            else torch.randn(64, 256, dtype=dtype)
        )
        batch = (x, torch.randint(0, 10, (len(x),)))
    else:
        ids = torch.randint(0, 256, (2, seq_len))
        batch = (ids, ids.clone())

    def step():
        cast = (
            torch.autocast("cpu", torch.bfloat16)
            if precision == "autocast"
            else contextlib.nullcontext()
        )
        with cast:
            if name in ("cnn", "mlp"):
                loss = model(*batch)
            else:
                loss = model(input_ids=batch[0], labels=batch[1]).loss
        loss.backward()
        del loss
        opt.step()
        opt.zero_grad(set_to_none=True)

    return model, opt, batch, step


def forward_then_backward(model, batch):
    def step():
        model(input_ids=batch[0], labels=batch[1]).loss.backward()

    return step
