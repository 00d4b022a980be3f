"""16 bits: rounding by chance against its expectation, our scaler against torch's, and who computes
in what.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from gradmem_lib import GradScaler, MemoryTracker, stochastic_round
from gradmem_lib.techniques.precision import SLICE, MasterAdamW, StochasticAdamW

INF = float("inf")
# all of them from 0 up, finite
EVERY = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).double()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("x", [-1.001, 255.9, 1.5e-40, 1 + 1 / 256, 2 - 2**-20])
def test_a_number_goes_to_one_of_its_neighbours_and_its_mean_stays(x):
    n = 40_000
    x = torch.tensor(x).double().item()  # as float32 has it
    found = stochastic_round(torch.full((n,), x), seeded()).double()
    above = EVERY[torch.searchsorted(EVERY, abs(x))].item()
    below = EVERY[torch.searchsorted(EVERY, abs(x)) - 1].item()
    assert set(found.abs().tolist()) <= {below, above}
    gap = above - below
    share = (abs(x) - below) / gap
    deviation = gap * (share * (1 - share) / n) ** 0.5
    assert abs(found.mean().item() - x) <= 5 * deviation + 2**-16 * gap


def test_what_bf16_holds_stays_and_so_does_what_is_no_number():
    exact = torch.cat([EVERY, -EVERY]).float()
    assert torch.equal(stochastic_round(exact, seeded()).float(), exact)
    odd = stochastic_round(torch.tensor([INF, -INF, float("nan")]), seeded())
    assert odd[0] == INF and odd[1] == -INF and odd[2].isnan()


def test_chance_comes_from_the_generator_that_is_given():
    x = torch.linspace(-1, 1, 1001)
    kept = x.clone()
    one, again, other = (stochastic_round(x, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other) and torch.equal(x, kept)


def trained(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    return parameter.detach().double().mean().item()


def test_updates_far_below_a_gap_count_on_average():
    """One weight many times over: its mean follows AdamW in float64, where plain AdamW in bf16
    stands still.
    """
    gradients = [0.02 * (1 + i % 3) for i in range(60)]
    many, settings = 20_000, {"lr": 1e-4, "weight_decay": 0.01}
    exact = nn.Parameter(torch.ones(1, dtype=torch.float64))
    wanted = trained(torch.optim.AdamW([exact], **settings), exact, gradients)
    plain = nn.Parameter(torch.ones(many, dtype=torch.bfloat16))
    assert trained(torch.optim.AdamW([plain], **settings), plain, gradients) == 1.0
    ours = nn.Parameter(torch.ones(many, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([ours], generator=seeded(), **settings)
    assert trained(optimizer, ours, gradients) - 1 == pytest.approx(wanted - 1, rel=0.05)
    assert wanted < 0.995
    v = optimizer.state[ours]["exp_avg_sq"].double().mean().item()
    assert v == pytest.approx(
        sum(0.001 * 0.999 ** (59 - i) * g**2 for i, g in enumerate(gradients)), rel=0.02
    )


def test_a_large_tensor_is_float32_a_slice_at_a_time():
    table = nn.Parameter(torch.zeros(64, SLICE // 16, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([table], generator=seeded())
    with MemoryTracker(optimizer=optimizer, live=False) as tracker:
        for _ in range(2):
            table.grad = torch.ones_like(table)
            optimizer.step()
    assert table.numel() == 4 * SLICE
    assert tracker.current.by_category["optimizer"] == 2 * 2 * table.numel() + 4
    assert max(tracker.timeline.by_category["temporaries"]) <= 12 * 4 * SLICE
    assert len(table.detach().unique()) > 1  # no slice was left out
    assert (table.detach() != 0).all()


FACTORS = (1.0, INF, 2.0, 0.5, 1.0, float("nan"), -INF, 3.0, 1.0, 1.0, 1.0)


def scaled(scaler, clips):
    """The factor and the weights after each step."""
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))]
    optimizer, found = torch.optim.SGD(weights, lr=0.1, momentum=0.5), []
    for factor in FACTORS:
        slopes = torch.tensor([[1.0, factor], [0.5, 2.0]])
        optimizer.zero_grad()
        scaler.scale(weights[0].sum() + (weights[1] * slopes).sum()).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            with pytest.raises(RuntimeError, match=r"update\(\)"):
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"update\(\)"):
            scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), *(weight.tolist() for weight in weights)))
    return found


@pytest.mark.parametrize(("clips", "interval"), [(False, 1), (True, 3)])
def test_our_scaler_does_what_torchs_does(interval, clips):
    ours, torchs = GradScaler(), torch.amp.GradScaler("cpu")
    assert ours.get_scale() == torchs.get_scale()
    assert ours.growth_interval == torchs.get_growth_interval()
    torchs = torch.amp.GradScaler("cpu", 2.0**4, growth_interval=interval)
    assert scaled(GradScaler(2.0**4, interval), clips) == scaled(torchs, clips)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(MasterAdamW, {"foreach": True}), (StochasticAdamW, {"generator": torch.Generator()})],
)
def test_a_copied_or_pickled_optimizer_goes_on_as_the_original(kind, settings):
    torch.manual_seed(0)
    model = nn.Linear(80, 64, dtype=torch.bfloat16)
    optimizer = kind(model.parameters(), lr=0.01, **settings)

    def update(model, optimizer):
        for p in model.parameters():
            p.grad = torch.linspace(-1, 1, p.numel()).view_as(p).to(p.dtype)
        optimizer.step()

    update(model, optimizer)
    pickled = pickle.dumps((model, optimizer))
    several = [copy.deepcopy((model, optimizer)), pickle.loads(pickled)]
    update(model, optimizer)
    for other, other_optimizer in several:
        update(other, other_optimizer)
        assert vars(other_optimizer).get("foreach") == settings.get("foreach")
        assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_closure_computes_the_gradients_of_the_master_weights():
    model = nn.Linear(4, 3).bfloat16()
    optimizer, before = MasterAdamW(model.parameters(), lr=0.1), model.weight.clone()

    def closure():
        loss = model(torch.randn(4, 4).bfloat16()).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert not model.weight.equal(before)
