# %% [markdown]
# # Title
# %%
print(1)
import matplotlib.pyplot as plt
_ = plt.plot([1,2])
