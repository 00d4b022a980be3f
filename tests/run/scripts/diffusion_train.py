"""Noise prediction with a small UNet: latents of a frozen autoencoder, and an average of weights.

The autoencoder stays beside the UNet during training: the second model.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 64, 4, 4), nn.SiLU(), nn.Conv2d(64, 256, 3, padding=1), nn.SiLU()
        )
        self.to_latent = nn.Conv2d(256, 4, 1)

    def encode(self, images):
        return self(images)

    def forward(self, images):
        return self.to_latent(self.encoder(images))


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Embedding(100, width)
        self.conv_in = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.mid = nn.Sequential(
            nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.conv_out = nn.Conv2d(2 * width, 4, 3, padding=1)

    def forward(self, sample, timestep):
        h = self.conv_in(sample) + self.time(timestep)[:, :, None, None]
        low = self.down(h)
        low = low + self.mid(low)
        return self.conv_out(torch.cat([h, self.up(F.silu(low))], dim=1))


def main():
    torch.manual_seed(0)
    vae = Autoencoder().requires_grad_(False).eval()
    unet = UNet()
    ema = copy.deepcopy(unet).requires_grad_(False)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    keep = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    for step in range(8):
        images = torch.rand(4, 3, 32, 32)
        with torch.no_grad():
            latents = vae.encode(images) * 0.18
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 100, (4,))
        kept = keep[timesteps].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        loss = F.mse_loss(unet(noisy, timesteps), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), unet.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        print(f"step {step} loss {loss.detach().item()!r} lr {scheduler.get_last_lr()[0]!r}")
    print(sum(p.double().sum() for p in ema.parameters()).item())


if __name__ == "__main__":
    main()
