# %% [markdown]
# # Convert a trained dropout network
#
# Somebody has trained a torch network with dropout. Monte Carlo dropout runs it fifty times, with other masks each time, and
# takes the spread for the uncertainty. `from_torch` needs one pass: it propagates the moments of the masks through the same weights.
#
# ## A network as one finds it
#
# Plain torch, nothing from this library: two hidden layers, dropout, the diabetes data of scikit-learn.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import mpgelu

X, y = load_diabetes(return_X_y=True)
X = torch.tensor(X / X.std(0), dtype=torch.float32)
y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
train, test = slice(0, 342), slice(342, None)

torch.manual_seed(0)
module = nn.Sequential(
    nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(64, 1),
)  # fmt: skip
epochs = 40  # smoke: 2
optimizer = torch.optim.Adam(module.parameters(), lr=3e-3, weight_decay=1e-3)
for _ in range(epochs):
    for rows in torch.randperm(342).split(32):
        loss = (module(X[train][rows])[:, 0] - y[train][rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
module.eval()
print(f"test error {(module(X[test])[:, 0] - y[test]).square().mean().sqrt().item():.3f} standard deviations")

# %% [markdown]
# ## Convert
#
# The module is traced, and every operation gets its rule. The report says what each of them costs in exactness.

# %%
network, report = mpgelu.from_torch(module, example=X[:8])
print(report)

# %% [markdown]
# The weights are shared, not copied. Given a tensor the network is the module in evaluation mode; given moments it carries
# the masks' randomness to the output, all at once:

# %%
start = time.process_time()
moments = mpgelu.propagate(network, X[test])
once = time.process_time() - start
print(
    f"{len(X[test])} rows in {1e3 * once:.0f} ms: mean {moments.mean[0].item():+.3f}, "
    f"standard deviation {moments.stddev[0].item():.3f} for the first"
)

# %% [markdown]
# ## How close is it?
#
# The reference is Monte Carlo dropout with far more samples than anybody takes.

# %%
draws = 10_000  # smoke: 300
module.train()
with torch.no_grad():
    samples = torch.cat([module(X[test].repeat(50, 1)).view(50, -1) for _ in range(draws // 50)])
module.eval()
mean, spread = samples.mean(0), samples.std(0)
off_mean = ((moments.mean[:, 0] - mean) / spread).square().mean().sqrt()
off_spread = (moments.stddev[:, 0] / spread - 1).square().mean().sqrt()
print(
    f"off by {off_mean:.1%} of the spread in the mean, by {off_spread:.1%} in the standard deviation (root mean square)"
)

# %% [markdown]
# And this is what a few samples would have said. On the left each dot is a row; on the right the error of the standard
# deviation against the number of passes.

# %%
passes = np.array([5, 10, 20, 50, 100, 200, 500, 1000])  # smoke: np.array([5, 10, 50])
sampled = [(samples[:k].std(0) / spread - 1).square().mean().sqrt().item() for k in passes]

figure, (left, right) = plt.subplots(1, 2, figsize=(7.8, 3.6))
limits = [0.9 * spread.min(), 1.1 * spread.max()]
left.plot(limits, limits, ":", color="C2", lw=1.2)
left.plot(spread, samples[:50].std(0), "o", ms=4, color="C1", alpha=0.55, mew=0, label="50 samples")
left.plot(spread, moments.stddev[:, 0], "o", ms=4, color="C0", mew=0, label="moments, one pass")
left.set(title="Standard deviation of each row", xlabel=f"from {draws:,} samples", ylabel="predicted")
left.legend()
right.loglog(passes, sampled, "o-", color="C1", ms=4, label="Monte Carlo dropout")
right.axhline(off_spread, color="C0", label="moments, one pass")
right.set(title="Error against passes", xlabel="passes", ylabel="relative error", ylim=(0.01, 1))
right.legend()

# %% [markdown]
# What is left is not sampling error: the rule for ReLU assumes a Gaussian input, and a unit that depends on a few masks is not
# quite Gaussian.
# `verify` shows at which layer, and how far. The worst unit after the second ReLU is one that is almost never positive: its
# tiny variance is all tail, and tails are where Gaussians err. At the output little of that is left.

# %%
check_draws = 5000  # smoke: 200
print(mpgelu.verify(network, X[test][:6], draws=check_draws))

# %% [markdown]
# ## Branches that share their randomness
#
# In a residual block the two summands see the same masks. Adding their variances, as if they were independent, is wrong;
# factored moments recognise what is shared and add it exactly.


# %%
class Residual(nn.Module):
    """A residual block after dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(10, 48), nn.Linear(48, 48), nn.Linear(48, 1)

    def forward(self, x):
        h = nn.functional.dropout(self.first(x), 0.2, self.training)
        h = h + torch.tanh(self.second(h))
        return self.last(h)


block = Residual()
converted, report = mpgelu.from_torch(block, example=X[:8])
exact = converted(mpgelu.FactoredMoments.certain(X[test])).stddev[:, 0].detach()
diagonal = converted(mpgelu.DiagonalMoments.certain(X[test])).stddev[:, 0].detach()
block.train()
with torch.no_grad():
    reference = torch.cat([block(X[test].repeat(50, 1)).view(50, -1) for _ in range(draws // 50)]).std(0)
print(f"shared randomness kept   {(exact / reference - 1).abs().mean():.1%} off")
print(f"correlations dropped     {(diagonal / reference - 1).abs().mean():.1%} off")

# %% [markdown]
# [Convert a torch network](../convert.md) lists every operation that is understood and how exact it is.
