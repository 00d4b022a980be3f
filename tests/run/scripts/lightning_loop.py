"""A module that knows its own steps and optimizers, and a small framework that calls them.

The framework's log keeps each loss with its graph: the leak.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class StepModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.logged = {}

    def log(self, name, value):
        self.logged.setdefault(name, []).append(value)


class Fitter:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def fit(self, module, train_loader, val_loader):
        optimizer = module.configure_optimizers()
        for _ in range(self.max_epochs):
            module.train()
            for index, batch in enumerate(train_loader):

                def closure(batch=batch, index=index):
                    loss = module.training_step(batch, index)
                    optimizer.zero_grad()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            module.eval()
            with torch.no_grad():
                for index, batch in enumerate(val_loader):
                    module.validation_step(batch, index)


class LitAutoEncoder(StepModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 784))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x_hat = self.decoder(self.encoder(x))
        loss = F.mse_loss(x_hat, x, reduction="none")
        self.log("train_loss", loss)
        return loss.mean()

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x).item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(0)
images = TensorDataset(torch.rand(160, 784), torch.zeros(160))
autoencoder = LitAutoEncoder()
loaders = DataLoader(images, batch_size=16, shuffle=True), DataLoader(images, batch_size=80)
Fitter(max_epochs=2).fit(autoencoder, *loaders)
print([loss.mean().item() for loss in autoencoder.logged["train_loss"]])
print(autoencoder.logged["val_loss"])
