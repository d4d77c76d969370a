# %% [markdown]
# # Where does the uncertainty come from?
#
# A prediction with a wide error bar raises the next question. Is it noise, which nothing removes? Is it a measurement that
# could be taken again, more precisely? Or is it the model, which has seen too little? Factored moments keep every source of
# randomness apart on its way to the output, so that the variance splits into parts that add up.
#
# ## A model of real patients

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_diabetes

import mpgelu

X, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
X = X.rename(
    columns={"s1": "cholesterol", "s2": "ldl", "s3": "hdl", "s4": "ratio", "s5": "triglycerides", "s6": "glucose"}
)
settings = {"effort": 0.15}  # smoke: {"steps": 5, "folds": 2}
exact = {"moments": mpgelu.FactoredMoments, "random_state": 0}
model = mpgelu.MPGELURegressor((32, 32), rate=0.05, sigma=None, diverse=False, **exact, **settings)
model.fit(X[:360], y[:360])

# %% [markdown]
# ## Split the variance of each prediction
#
# Suppose that blood pressure was read with an error of 8 mm and body-mass index with one of 1. `attribute` gives one line for
# each row and source; the parts of a row add up to the variance that `predict` gives, to rounding.

# %%
errors = np.array([{"bp": 8.0, "bmi": 1.0}.get(name, 0.0) for name in X.columns])
patients = X[360:400]
sources = mpgelu.attribute(model, patients, input_std=errors)
_, stddev = model.predict(patients, return_std=True, input_std=errors)
print(
    "largest difference of the sum from the variance:",
    f"{np.abs(sources.groupby('row').variance.sum() / stddev**2 - 1).max():.1e}",
)
print(sources[sources.row == 0].nlargest(5, "variance").round(3).to_string(index=False))

# %% [markdown]
# Noise dominates these patients, as it did in [the first tutorial](1_table.md). Without it the rest becomes visible: what
# a second reading would remove (input), what the networks do not agree on, and their masks.

# %%
label = sources.kind.where(sources.kind != "input", "error of " + sources.unit.astype(str))
label = label.replace(
    {
        "disagreement": "networks disagree",
        "dropout": "masks of dropout",
        "mpgelu": "masks of MP-GELU",
        "distance": "distance from the data",
    }
)
wide = sources.assign(label=label).pivot_table(index="row", columns="label", values="variance", aggfunc="sum")
rest = wide.drop(columns="noise")
rest = rest.loc[:, rest.sum() > 0.005 * rest.to_numpy().sum()]
rest = rest[rest.mean().sort_values(ascending=False).index]
rest = rest.loc[rest.sum(axis=1).sort_values().index]

figure, axes = plt.subplots(figsize=(7.8, 4.0))
base = np.zeros(len(rest))
for number, (name, part) in enumerate(rest.items()):
    axes.bar(np.arange(len(rest)), part, bottom=base, width=0.86, color=f"C{number}", label=name)
    base += part.to_numpy()
axes.set(
    title="Variance of 40 predictions, without the noise",
    xlabel="patients",
    ylabel="variance",
    xlim=(-0.7, len(rest) - 0.3),
)
axes.grid(axis="x")
axes.legend(ncols=2)
print(
    f"noise is {wide['noise'].sum() / wide.to_numpy().sum():.0%} of all variance; of the rest "
    + ", ".join(f"{name} {share:.0%}" for name, share in (rest.sum() / rest.to_numpy().sum()).items())
)

# %% [markdown]
# ## One network, unit by unit
#
# In a single network the split goes down to the unit. Here is what each hidden unit's mask does to the output, for the first
# patients: a few units carry most of the randomness.

# %%
scaled = torch.tensor(((X - X.mean()) / X.std()).to_numpy(), dtype=torch.float32)
target = torch.tensor(((y - y.mean()) / y.std()).to_numpy(), dtype=torch.float32)
torch.manual_seed(0)
epochs = 80  # smoke: 2
network, likelihood = mpgelu.network(10, hidden=(24, 24), rate=0.05), mpgelu.HeteroscedasticGaussian()
mpgelu.fit(network, likelihood, (scaled[:360], target[:360]), epochs=epochs, clip=10, progress=False)
units = mpgelu.attribute(network, scaled[360:384], features=list(X.columns))
masks = units[units.kind != "noise"]
picture = masks.assign(source=masks.layer.astype(str) + "/" + masks.unit.astype(str)).pivot_table(
    index="source", columns="row", values="variance", aggfunc="sum", sort=False
)

figure, axes = plt.subplots(figsize=(7.4, 5.0))
shown = axes.imshow(np.sqrt(picture.to_numpy()), aspect="auto", cmap="magma", interpolation="nearest", rasterized=True)
names = masks.drop_duplicates(["layer", "unit"]).assign(layer=lambda frame: frame.kind + " " + frame.layer.astype(str))
edges = np.flatnonzero(names.layer.to_numpy()[1:] != names.layer.to_numpy()[:-1]) + 0.5
centres = np.diff([-0.5, *edges, len(names) - 0.5]) / 2 + np.array([-0.5, *edges])
axes.hlines(edges, -0.5, picture.shape[1] - 0.5, color="w", lw=1)
axes.set_yticks(centres, names.layer.unique())
axes.set(title="Standard deviation that each mask causes", xlabel="patients")
axes.grid(visible=False)
figure.colorbar(shown, ax=axes, shrink=0.8, label="standard deviations of the target")

# %% [markdown]
# ## Are these moments right?
#
# A split of a wrong variance would be worth nothing. `verify` samples the same random network and compares means and
# covariances after every layer.

# %%
draws = 3000  # smoke: 200
audit = mpgelu.verify(network, scaled[360:364], draws=draws)
print(audit)
print(audit.words())

# %% [markdown]
# What would be lost by dropping correlations, as most libraries do? The same audit, told to start with `DiagonalMoments`:

# %%
dropped = mpgelu.verify(network, scaled[360:364], draws=draws, moments=mpgelu.DiagonalMoments.certain)
figure, axes = plt.subplots(figsize=(7.4, 3.2))
place = np.arange(len(audit.layers))
axes.bar(
    place - 0.2,
    [layer.covariance_error for layer in audit.layers],
    0.38,
    color="C0",
    label="factored: sampling error only",
)
axes.bar(
    place + 0.2,
    [layer.covariance_error for layer in dropped.layers],
    0.38,
    color="C1",
    label="diagonal: correlations dropped",
)
axes.set_xticks(place, [f"{layer.layer} {layer.kind}" for layer in audit.layers], rotation=25, ha="right")
axes.set(title="Worst error of a covariance, layer by layer", ylabel="relative to both sd", ylim=(0, 1.25))
axes.legend(ncols=2, loc="upper left")
inflated = (
    network(mpgelu.DiagonalMoments.certain(scaled[360:])).stddev[:, 0]
    / network(mpgelu.FactoredMoments.certain(scaled[360:])).stddev[:, 0]
)
print(
    f"the output's standard deviation without correlations is "
    f"{inflated.min():.2f} to {inflated.max():.2f} times the exact one"
)

# %% [markdown]
# More: [Explain and verify](../explain.md), and [what breaks the Gaussian assumption](../concepts/gaussian.md).
