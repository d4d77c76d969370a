# %% [markdown]
# # Deploy with ONNX
#
# A fitted model becomes one file that holds everything between raw features and the predictive distribution. Where it runs
# there is neither torch nor this library, only an ONNX runtime.
#
# ## Fit and export

# %%
import json
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from sklearn.datasets import load_diabetes

import mpgelu

X, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
settings = {"effort": 0.15}  # smoke: {"steps": 5, "folds": 2}
model = mpgelu.MPGELURegressor((32, 32), rate=0.05, sigma=None, diverse=False, random_state=0, **settings)
model.fit(X[:342], y[:342])

path = Path(tempfile.mkdtemp()) / "diabetes.onnx"
mpgelu.export_onnx(model, path, q=(0.05, 0.25, 0.5, 0.75, 0.95))
print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# ## Run it somewhere else
#
# From here on only numpy and onnxruntime are used. The file knows its features, its quantiles and who wrote it.

# %%
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
about = session.get_modelmeta().custom_metadata_map
print("features ", ", ".join(json.loads(about["feature_names"])))
print("outputs  ", ", ".join(output.name for output in session.get_outputs()))
features = X[342:].to_numpy(dtype=np.float32)
names = ["mean", "stddev", "epistemic_std", "aleatoric_std", "quantiles"]
result = dict(zip(names, session.run(names, {"features": features}), strict=True))
for row in range(3):
    print(
        "  ".join(
            f"{name} {np.array2string(values[row], precision=0, floatmode='fixed')}" for name, values in result.items()
        )
    )

# %% [markdown]
# ## The same numbers
#
# A deployed model that says something else is worse than none. The graph agrees with the library to the rounding of float32:

# %%
parts = model.predict_parts(X[342:])
quantiles = model.predict_quantile(X[342:], [0.05, 0.25, 0.5, 0.75, 0.95])
expected = {
    "mean": parts.mean,
    "epistemic_std": parts.epistemic_std,
    "aleatoric_std": parts.aleatoric_std,
    "quantiles": quantiles,
}
for name, values in expected.items():
    print(f"{name:14s} largest relative difference {np.abs(result[name] / values - 1).max():.1e}")

# %%
order = np.argsort(result["mean"])
place = np.arange(len(order))
figure, axes = plt.subplots(figsize=(7.6, 3.5))
low, quarter, median, three_quarters, high = result["quantiles"][order].T
axes.fill_between(place, low, high, color="C0", alpha=0.18, lw=0, label="5 to 95 %")
axes.fill_between(place, quarter, three_quarters, color="C0", alpha=0.3, lw=0, label="25 to 75 %")
axes.plot(place, median, color="C0", label="median")
axes.plot(place, y[342:].to_numpy()[order], "o", ms=3.5, color="C1", label="what happened")
axes.set(
    title="100 patients, predicted by the ONNX graph",
    xlabel="patients, by predicted mean",
    ylabel="progression",
    xlim=(0, 99),
)
axes.legend(ncols=2, loc="upper left")

# %% [markdown]
# ## How fast?
#
# Processor time of one row, beside the library's own `predict`. (This page is built on whatever machine builds it; `mpgelu bench`
# measures speed with care.)

# %%
calls = 200  # smoke: 3


def microseconds(call, repeat: int) -> float:
    """Processor time of a call, on average."""
    call()
    start = time.process_time()
    for _ in range(repeat):
        call()
    return 1e6 * (time.process_time() - start) / repeat


options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
short = path.with_name("short.onnx")
mpgelu.export_onnx(model, short, q=())
for name, file in (("without quantiles", short), ("with five quantiles", path)):
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    took = microseconds(lambda session=session: session.run(None, {"features": features[:1]}), calls)
    print(f"ONNX, {name:20s} {took:7.0f} µs")
print(
    "predict(return_std=True)   "
    f"{microseconds(lambda: model.predict(X[342:343], return_std=True), calls // 20 + 1):7.0f} µs"
)

# %% [markdown]
# [Deploy](../deploy.md) documents every input, output and metadata entry, and models of tables with text and gaps.
