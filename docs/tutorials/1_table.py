# %% [markdown]
# # From a table to calibrated decisions
#
# A table of patients, a number to predict, and a decision that depends on it. This tutorial fits a model, looks at what it
# says, checks whether it may be believed, and then decides, by probabilities instead of by the prediction alone.
#
# The data are the 442 diabetes patients of scikit-learn: age, sex, body-mass index, blood pressure and six blood values,
# and how far the disease progressed in a year.

# %%
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import mpgelu

table = load_diabetes(as_frame=True, scaled=False).frame
train, test = train_test_split(table, test_size=0.35, random_state=1)
X_train, y_train = train.drop(columns="target"), train["target"].to_numpy()
X_test, y_test = test.drop(columns="target"), test["target"].to_numpy()
print(train.head(3).to_string())

# %% [markdown]
# ## Fit
#
# There is nothing to tune. `effort=0.5` takes half of the default's steps.

# %%
settings = {"effort": 0.5}  # smoke: {"hidden": (8,), "steps": 5, "folds": 2, "diverse": False, "sigma": None}
model = mpgelu.MPGELURegressor(random_state=0, **settings).fit(X_train, y_train)
mean, epistemic, aleatoric = model.predict_parts(X_test)
stddev = np.hypot(epistemic, aleatoric)
print(f"root mean square error {np.sqrt(np.mean((mean - y_test) ** 2)):.1f}, of a constant {y_test.std():.1f}")
print(
    f"typical standard deviation {np.median(stddev):.1f}: "
    f"{np.median(epistemic):.1f} epistemic, {np.median(aleatoric):.1f} aleatoric"
)

# %% [markdown]
# The error is large, and the model knows: most of it is *aleatoric*, noise that the features do not explain and that more
# patients would not remove. The *epistemic* part is what the model does not know about the function.
#
# Every patient has a distribution of their own. Here are all of the test patients, sorted by their predicted mean.

# %%
order = np.argsort(mean)
place = np.arange(len(order))
figure, axes = plt.subplots(figsize=(7.6, 3.8))
for level, alpha in ((0.9, 0.18), (0.5, 0.3)):
    lower, upper = model.predict_interval(X_test.iloc[order], level=level)
    axes.fill_between(place, lower, upper, color="C0", alpha=alpha, lw=0, label=f"{level:.0%} interval")
    inside = np.mean((lower < y_test[order]) & (y_test[order] < upper))
    print(f"{inside:.0%} of the new targets are inside their {level:.0%} interval")
axes.plot(place, mean[order], color="C0", label="mean")
axes.plot(place, y_test[order], "o", ms=3.5, color="C1", alpha=0.85, label="what happened")
axes.set(
    title="155 patients the model has not seen",
    xlabel="patients, by predicted mean",
    ylabel="progression",
    xlim=(0, len(place)),
)
axes.legend(ncols=2, loc="upper left")

# %% [markdown]
# ## May it be believed?
#
# If the distributions are right, the probabilities that they gave to values below what happened are uniform: their histogram
# is flat, and their distribution function is the diagonal, up to chance. In 95 % of all cases chance stays within the band.

# %%
predicted = model.predict_distribution(X_test)
levels = np.sort(predicted.cdf(y_test).numpy())
expected = np.linspace(0, 1, 201)
observed = np.searchsorted(levels, expected) / len(levels)
wiggle = 1.36 / np.sqrt(len(levels))

figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.4))
axes[0].fill_between(expected, expected - wiggle, expected + wiggle, color="C0", alpha=0.15, lw=0)
axes[0].plot(expected, expected, ":", color="C0", lw=1)
axes[0].plot(expected, observed, color="C1")
axes[0].set(title="Calibration", xlabel="probability said", ylabel="share that happened", xlim=(0, 1), ylim=(0, 1))
axes[1].hist(levels, bins=10, range=(0, 1), color="C1", alpha=0.8, rwidth=0.92)
axes[1].axhline(len(levels) / 10, color="C0", ls=":", lw=1.4)
axes[1].set(title="Its histogram", xlabel="probability below what happened", ylabel="patients")
print(f"largest distance from the diagonal {np.abs(observed - expected).max():.3f}, allowed {wiggle:.3f}")

# %% [markdown]
# ## Decide
#
# Suppose that a costly treatment pays off for patients whose disease will progress beyond 200: treating costs 1, leaving such
# a patient untreated costs 8. The mean does not tell whom to treat. The probability does: treat where 8 times the probability
# of passing 200 is more than 1. The more unequal the costs, the more this matters.

# %%
threshold, cost_of_missing = 200.0, 8.0
probability = predicted.probability_above(np.full(len(y_test), threshold)).numpy()
progressed = y_test > threshold


def cost(treated: np.ndarray) -> float:
    """Average cost per patient of a rule, with what really happened."""
    return float(np.mean(treated + cost_of_missing * (progressed & ~treated)))


rules = {
    "treat everyone": np.ones(len(y_test), dtype=bool),
    "treat nobody": np.zeros(len(y_test), dtype=bool),
    "treat if the mean passes 200": mean > threshold,
    "treat if the probability pays": cost_of_missing * probability > 1,
}
for name, treated in rules.items():
    print(f"{name:31s} {treated.sum():4d} treated   cost {cost(treated):.2f}")

# %% [markdown]
# The probabilities give the whole curve, for every price of a miss, without another model:

# %%
cutoffs = np.linspace(0.0, 1.0, 101)
figure, axes = plt.subplots(figsize=(7.2, 3.4))
axes.plot(cutoffs, [cost(probability > cutoff) for cutoff in cutoffs], color="C0", label="treat above this probability")
axes.axvline(1 / cost_of_missing, color="C1", ls="--", lw=1.4, label="the rule: 1 / 8")
axes.axhline(cost(mean > threshold), color="C2", ls=":", lw=1.6, label="deciding by the mean")
axes.set(title="Cost of a decision rule", xlabel="cut-off", ylabel="average cost per patient", xlim=(0, 1))
axes.legend()

# %% [markdown]
# ## Intervals with a guarantee
#
# Where a promise is needed, rows that `fit` has not seen turn the intervals into ones that hold at least 90 % of new
# targets on average, however wrong the model is ([how](../regression.md#guaranteed-coverage)).

# %%
half = len(y_test) // 2
model.calibrate(X_test[:half], y_test[:half])
lower, upper = model.predict_interval(X_test[half:], level=0.9)
print(
    f"{np.mean((lower <= y_test[half:]) & (y_test[half:] <= upper)):.0%} inside, "
    f"average width {np.mean(upper - lower):.0f}"
)

# %% [markdown]
# The same without code: [Tables on the command line](../tables.md). Why the model is unsure about one patient:
# [Where uncertainty comes from](4_sources.md).
