# %% [markdown]
# # Choose what to measure next
#
# Every measurement costs. Where should the next one be? Where the model is unsure, one would say; but unsure in which way?
# Where the *noise* is large, another measurement helps little, and a rule that goes by the total variance is drawn there. The
# *epistemic* part is what measuring reduces. Here both rules are set against random choice.
#
# ## A small problem
#
# A function on [0, 4] that is dull and very noisy on the left and quick and quiet on the right. Twelve measurements are given,
# thirty-two may be bought, four at a time.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import mpgelu


def truth(x: torch.Tensor) -> torch.Tensor:
    """What is to be learned."""
    return 0.4 * torch.sin(1.5 * x) + torch.sigmoid(6 * (x - 2)) * torch.sin(5 * x)


def noise(x: torch.Tensor) -> torch.Tensor:
    """Its standard deviation: large on the left, small on the right."""
    return 0.05 + 0.75 * torch.sigmoid(-6 * (x - 1.4))


def measure(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One noisy measurement at each x."""
    return truth(x) + noise(x) * torch.randn(x.shape, generator=generator)


grid = torch.linspace(0, 4, 201)

# %% [markdown]
# ## The model
#
# Six networks trained as one `Stack`, whose mixture says mean, epistemic and aleatoric variance. After each purchase they
# go on training with the new data.

# %%
members = 6  # smoke: 2
epochs = 100  # smoke: 3


class Model:
    """Networks that go on learning as data come in."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.stack = mpgelu.Stack([mpgelu.network(1, hidden=(64, 64), rate=0.01) for _ in range(members)])
        self.likelihood = mpgelu.HeteroscedasticGaussian()

    def fit(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """More steps on all data so far; each network sees its own resampled rows."""
        rows = torch.stack([torch.randint(len(x), (len(x),)) for _ in range(members)])
        mpgelu.fit(
            self.stack,
            self.likelihood,
            ((x[rows] / 2 - 1)[..., None], y[rows]),
            epochs=epochs,
            clip=10,
            progress=False,
            moments=mpgelu.DiagonalMoments.certain,
        )

    def predict(self, x: torch.Tensor) -> mpgelu.Predictive:
        """The mixture of the networks' distributions."""
        inputs = (x / 2 - 1)[None, :, None].expand(members, -1, -1)
        with torch.no_grad():
            return self.likelihood.predictive(self.stack(mpgelu.DiagonalMoments.certain(inputs))).mixture_over(0)


# %% [markdown]
# ## Three ways to choose
#
# The next four places are drawn with probabilities proportional to the square of the epistemic variance, to that of the total
# variance, or all alike.


# %%
def weights(strategy: str, p: mpgelu.Predictive) -> torch.Tensor:
    """How likely each place of the grid is to be measured next."""
    if strategy == "random":
        return torch.ones_like(p.mean)
    return (p.epistemic_variance if strategy == "epistemic" else p.variance).square()


def learn(strategy: str, seed: int, rounds: int) -> tuple[list[float], torch.Tensor, torch.Tensor, mpgelu.Predictive]:
    """Buy measurements round by round; the error of the mean after each, and what was bought."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(12, generator=generator)
    y = measure(x, generator)
    model, history = Model(seed), []
    for step in range(rounds + 1):
        model.fit(x, y)
        p = model.predict(grid)
        history.append((p.mean - truth(grid)).square().mean().sqrt().item())
        if step < rounds:
            chosen = grid[torch.multinomial(weights(strategy, p), 4, generator=generator)]
            x, y = torch.cat([x, chosen]), torch.cat([y, measure(chosen, generator)])
    return history, x, y, p


seeds = 3  # smoke: 1
rounds = 8  # smoke: 2
results = {
    strategy: [learn(strategy, seed, rounds) for seed in range(seeds)] for strategy in ("epistemic", "total", "random")
}
for strategy, runs in results.items():
    errors = np.array([history for history, *_ in runs])
    bought = torch.cat([x[12:] for _, x, *_ in runs])
    print(
        f"{strategy:10s} error {errors[:, 0].mean():.2f} -> {errors[:, -1].mean():.3f} "
        f"± {errors[:, -1].std(ddof=seeds > 1) / seeds**0.5:.3f}, "
        f"{(bought < 1.4).float().mean():.0%} of what it bought is in the noisy part"
    )

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.0, 3.6), width_ratios=(1.25, 1))
for number, (strategy, runs) in enumerate(results.items()):
    errors = np.array([history for history, *_ in runs])
    places = 12 + 4 * np.arange(errors.shape[1])
    left.plot(places, errors.mean(0), "o-", ms=4, color=f"C{number}", label=strategy)
    left.fill_between(places, errors.min(0), errors.max(0), color=f"C{number}", alpha=0.1, lw=0)
    bought = torch.cat([x[12:] for _, x, *_ in runs])
    right.hist(bought.numpy(), bins=16, range=(0, 4), histtype="step", lw=1.8, color=f"C{number}", label=strategy)
left.set(
    title=f"Error of the mean, {seeds} runs", xlabel="measurements", ylabel="root mean square error", ylim=(0, None)
)
left.legend()
right.axvspan(0, 1.4, color="C1", alpha=0.08, lw=0)
right.set(title="Where it measured", xlabel="x (noisy part shaded)", ylabel="measurements", xlim=(0, 4))

# %% [markdown]
# ## What the two rules saw
#
# On average over these runs, both rules that ask the model need fewer measurements than random choice. Between the two, so
# few runs show no difference of the error; the rule of the total variance buys a larger share in the noisy part. Here is the
# last state of one run each: both leave a stretch of the middle unmeasured, since six smooth networks that agree on
# something wrong do not know it.

# %%
figure, both = plt.subplots(1, 2, figsize=(8.0, 3.5), sharey=True)
for axes, strategy in zip(both, ("epistemic", "total"), strict=True):
    _, x, y, p = results[strategy][0]
    total, epistemic = p.stddev, p.epistemic_variance.sqrt()
    axes.fill_between(grid, p.mean - 2 * total, p.mean + 2 * total, color="C1", alpha=0.2, lw=0, label="total")
    axes.fill_between(
        grid, p.mean - 2 * epistemic, p.mean + 2 * epistemic, color="C0", alpha=0.4, lw=0, label="epistemic part"
    )
    axes.plot(grid, truth(grid), ":", color="C2", label="truth")
    axes.plot(grid, p.mean, color="C0")
    axes.plot(x, y, "o", ms=3.5, color="C4", alpha=0.8, label="measured")
    axes.set(title=f"By the {strategy} variance", xlabel="x", ylim=(-2.6, 2.6), xlim=(0, 4))
both[0].legend(ncols=2, loc="lower left", fontsize=8)

# %% [markdown]
# Three runs of a problem made for the purpose are an illustration, not a benchmark: the epistemic part ranks places, and is
# rough as a size. How far each part can be trusted: [Epistemic and aleatoric](../concepts/uncertainty.md).
