"""LoRA on a tiny language model with peft, by hand, with a sample of text after each epoch."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


def collate(rows):
    ids = torch.stack(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def main():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    base = GPT2LMHeadModel(config)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    model.print_trainable_parameters()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    rows = list((torch.arange(32 * 24).view(32, 24) * 5) % 256)
    loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate)
    for epoch in range(2):
        model.train()
        total = 0.0
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach().float()
        print(f"epoch {epoch}: {total.item() / len(loader)!r}")
        model.eval()
        prompt = {"input_ids": rows[0][None, :4], "attention_mask": torch.ones(1, 4).long()}
        print(model.generate(**prompt, max_new_tokens=6, do_sample=True, pad_token_id=0).tolist())


if __name__ == "__main__":
    main()
