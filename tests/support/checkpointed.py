"""What tests of checkpointing run: a chain of layers, small models of six families, and their
steps.
"""

import torch
import transformers
from torch import nn

from gradmem_lib.compat.modules import call_override

ROWS, WIDTH = 16, 16
X = ROWS * WIDTH * 4
# so that the gradient which the loss sends back is a tensor of X bytes
WEIGHTS = torch.rand(ROWS, WIDTH)


def weighted(y):
    return y * WEIGHTS


N = 6
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": N,
    "num_attention_heads": 2,
}
LLAMA_LIKE = SIZES | {"vocab_size": 50, "num_key_value_heads": 1, "attention_dropout": 0.2}
HF = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_LIKE)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA_LIKE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**LLAMA_LIKE, head_dim=8)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50,
            n_embd=16,
            n_layer=N,
            n_head=2,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=1,
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, vocab_size=50, max_position_embeddings=32)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **SIZES,
            image_size=8,
            patch_size=4,
            hidden_dropout_prob=0.2,
            attention_probs_dropout_prob=0.2,
        )
    ),
}


def block():
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 8)
    )


class Looped(nn.Module):
    """A ModuleList called in a loop, each layer with a mask by keyword; layers return a tuple."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = block()

        def forward(self, x, *, mask):
            return (x + self.body(x) * mask, None)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(N))

    def forward(self, x):
        mask = torch.linspace(0, 1, 8)
        for layer in self.layers:
            x = layer(x, mask=mask)[0]
        return x


PLAIN = {"sequential": lambda: nn.Sequential(*(block() for _ in range(N))), "modulelist": Looped}
FAMILIES = HF | PLAIN


def made(family):
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def batch_for(family):
    torch.manual_seed(1)
    if family in PLAIN:
        return torch.randn(3, 8)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    ids = torch.randint(2, 50, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def layers_of(family, model):
    return model.layers if family == "modulelist" else model


def step(family, model, batch):
    """Loss and gradients of one training step with a fixed random state."""
    torch.manual_seed(7)
    if family in PLAIN:
        loss = model(batch).square().sum()
    else:
        loss = model(**batch, **({} if family in ("vit", "bert") else {"use_cache": False})).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def same(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        if gradient is None:
            assert other[1][name] is None, name
        else:
            assert torch.equal(gradient, other[1][name]), name


def untouched(model):
    return not any(call_override(m) or m._forward_pre_hooks for m in model.modules())


def sum_all(item):
    return item if isinstance(item, int) else sum(map(sum_all, item))
