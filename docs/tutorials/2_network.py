# %% [markdown]
# # Build and train a moment network in torch
#
# The estimator hides what happens. Here is all of it, by hand: a value that carries a mean and a covariance, the three rules
# that an MP-GELU network needs, the loss in closed form, and a training loop in plain torch.
#
# ## A random vector as a value
#
# `FactoredMoments` holds the mean $m$ and the covariance $C$ of a vector. Dropout makes a known input random: each feature is
# kept with probability $k$ and divided by $k$, so that the mean stays and the variance is $m^2 (1 - k) / k$.

# %%
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import mpgelu

torch.manual_seed(0)
x = torch.tensor([[1.0, -2.0, 0.5]])
h = mpgelu.Dropout(0.1)(mpgelu.FactoredMoments.certain(x))
print("mean    ", h.mean[0])
print("variance", h.variance[0], "=", x[0] ** 2 * 0.1 / 0.9)

# %% [markdown]
# A linear map takes $m$ to $W m + b$ and $C$ to $W C W^\top$, exactly. The units are correlated now, since they see the same
# features:

# %%
linear = mpgelu.Linear(3, 4)
h = linear(h)
deviation = h.stddev[0]
print((h.covariance[0] / deviation.outer(deviation)).detach().numpy().round(2))

# %% [markdown]
# MP-GELU keeps unit $i$ with the probability $k_i = \Phi(m_i / \sqrt{v_i})$ that it is positive. It is no more than a mask, so
# mean and covariance are exact again:
#
# $$ m_i \to k_i m_i, \qquad C_{ij} \to k_i k_j C_{ij} + \delta_{ij}\, k_i (1 - k_i)(v_i + m_i^2). $$
#
# Sampling the same masks agrees, as it must:

# %%
draws = 200_000  # smoke: 20_000
masked = mpgelu.MPGELU()(h)
keep = torch.special.ndtr(h.mean[0] / h.stddev[0])
with torch.no_grad():
    inputs = x * (torch.rand(draws, 3) < 0.9) / 0.9
    samples = linear.forward(inputs) * (torch.rand(draws, 4) < keep)
print("mean    ", masked.mean[0].detach().numpy().round(3), "sampled", samples.mean(0).numpy().round(3))
print("stddev  ", masked.stddev[0].detach().numpy().round(3), "sampled", samples.std(0).numpy().round(3))

# %% [markdown]
# ## The loss
#
# The network has two outputs, $h_1$ the mean of the target and $h_2$ the logarithm of its noise variance:
# $y \mid h \sim N(h_1, e^{h_2})$. What is to be maximised is the average of the log-likelihood over the random $h$. For
# Gaussian $h \sim N(\mu, S)$ it is a formula:
#
# $$ \mathbb E \log p(y \mid h) = -\tfrac12 \Big[ \log 2\pi + \mu_2 + e^{-\mu_2 + S_{22}/2}
#    \big( (y - \mu_1 + S_{12})^2 + S_{11} \big) \Big]. $$
#
# `HeteroscedasticGaussian` is that formula. Written out, and compared:

# %%
moments = mpgelu.network(3, hidden=(16,))(mpgelu.FactoredMoments.certain(x))
(m1, m2), S, y0 = moments.mean[0], moments.covariance[0], torch.tensor([0.3])
by_hand = -0.5 * (math.log(2 * math.pi) + m2 + torch.exp(-m2 + S[1, 1] / 2) * ((y0 - m1 + S[0, 1]) ** 2 + S[0, 0]))
likelihood = mpgelu.HeteroscedasticGaussian()
print(f"{by_hand.item():.6f} {likelihood.expected_log_prob(moments, y0).item():.6f}")

# %% [markdown]
# ## Train it
#
# The layers are `nn.Module`s and moments have gradients, so the loop is the one everybody knows. The data are a wave whose
# noise grows, with a gap in the middle where nothing was measured.

# %%
generator = torch.Generator().manual_seed(1)
position = torch.cat([torch.rand(110, generator=generator) * 1.2 - 2, torch.rand(110, generator=generator) * 1.2 + 0.8])
noise = 0.06 + 0.14 * (position + 2) / 2
target = torch.sin(2.2 * position) + noise * torch.randn(220, generator=generator)

torch.manual_seed(3)
rate = 0.04
network = nn.Sequential(
    mpgelu.Linear(1, 64), mpgelu.MPGELU(), mpgelu.Dropout(rate),
    mpgelu.Linear(64, 64), mpgelu.MPGELU(), mpgelu.Dropout(rate),
    mpgelu.Linear(64, 2),
)  # fmt: skip
steps = 900  # smoke: 15
optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
losses = []
for _ in range(steps):
    moments = network(mpgelu.FactoredMoments.certain(position[:, None]))
    loss = -likelihood.expected_log_prob(moments, target).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 10.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} in the end; no sampling, the same bits every time")

# %% [markdown]
# ## What it predicts
#
# One pass gives the distribution of $y$, in two parts. The noise (aleatoric) follows the data; the network's own randomness
# (epistemic) is smallest where there are data.

# %%
grid = torch.linspace(-2.6, 2.6, 300)
p = likelihood.predictive(mpgelu.propagate(network, grid[:, None]))
total, epistemic = p.stddev.numpy(), p.epistemic_variance.sqrt().numpy()
mean = p.mean.numpy()

figure, (bands, parts) = plt.subplots(2, 1, figsize=(7.4, 5.2), sharex=True, height_ratios=(2.2, 1))
bands.fill_between(grid, mean - 2 * total, mean + 2 * total, color="C1", alpha=0.25, lw=0, label="total")
bands.fill_between(
    grid, mean - 2 * epistemic, mean + 2 * epistemic, color="C0", alpha=0.45, lw=0, label="epistemic part"
)
bands.plot(grid, mean, color="C0", label="mean")
bands.plot(position, target, ".", ms=4, color="C4", alpha=0.7, label="data")
bands.plot(grid, torch.sin(2.2 * grid), ":", color="C2", lw=1.4, label="truth")
bands.set(title="Bands of two standard deviations", ylabel="y", ylim=(-2.6, 2.6))
bands.legend(ncols=5, loc="upper center", fontsize=8.5)
parts.plot(grid, p.aleatoric_variance.sqrt(), color="C1", label="aleatoric")
parts.plot(grid, epistemic, color="C0", label="epistemic")
parts.plot(position.sort().values, noise[position.argsort()], ":", color="C2", label="true noise")
parts.set(title="The two parts", xlabel="x", ylabel="standard deviation", ylim=(0, None), xlim=(-2.6, 2.6))
parts.legend(ncols=3, loc="upper center")

# %% [markdown]
# One network with dropout knows little about what it has not seen: in the gap its own randomness barely grows. Networks that
# were started differently, and that each saw other rows, disagree there. That disagreement is the better part of the epistemic
# variance; it is why the estimator is an ensemble. A `Stack` trains all of them as one program, and `mixture_over` joins their
# distributions:

# %%
members, epochs = 8, 500  # smoke: 2, 5
torch.manual_seed(0)
stack = mpgelu.Stack([mpgelu.network(1, hidden=(64, 64), rate=0.002) for _ in range(members)])
rows = torch.randint(220, (members, 220))
start = mpgelu.DiagonalMoments.certain  # cheaper steps; predictions below are exact
mpgelu.fit(
    stack, likelihood, (3 * position[rows, None], target[rows]), epochs=epochs, clip=10, moments=start, progress=False
)
each = likelihood.predictive(stack(mpgelu.FactoredMoments.certain(3 * grid[:, None].expand(members, -1, -1))))
mixture = each.mixture_over(0)

figure, axes = plt.subplots(figsize=(7.4, 3.4))
mean, total, epistemic = (t.detach().numpy() for t in (mixture.mean, mixture.stddev, mixture.epistemic_variance.sqrt()))
axes.fill_between(grid, mean - 2 * total, mean + 2 * total, color="C1", alpha=0.25, lw=0, label="total")
axes.fill_between(
    grid, mean - 2 * epistemic, mean + 2 * epistemic, color="C0", alpha=0.45, lw=0, label="epistemic part"
)
axes.plot(grid, each.mean.detach().T, color="C0", lw=0.6, alpha=0.6)
axes.plot(position, target, ".", ms=4, color="C4", alpha=0.7)
axes.set(
    title=f"{members} networks: they agree where there are data",
    xlabel="x",
    ylabel="y",
    ylim=(-3, 3.4),
    xlim=(-2.6, 2.6),
)
axes.legend(ncols=2, loc="upper center")
gap = (grid.abs() < 0.5).numpy()
print(
    f"in the gap: epistemic {np.mean(epistemic[gap]):.2f} for {members} networks, "
    f"{np.mean(p.epistemic_variance.sqrt().numpy()[gap]):.2f} for the one above"
)

# %% [markdown]
# Next: [Moment propagation from scratch](../concepts/propagation.md) for the ideas,
# [Train a network](../training.md) for what `mpgelu.fit` adds to this loop.
