"""The README's example: three simulated hospitals, one upload each, judged against training alone."""

# %%
import fedbicross

cells = fedbicross.load_dataset("cells", train_size=600, test_size=300)  # or your own folder
results = fedbicross.run(
    cells,
    methods=["ensemble:class_weighted"],
    clients=3,
    partition={"alpha": 0.3},
    model="resnet8",
    training={"recipe": "modern", "epochs": 5, "batch_size": 32},
)

# %% [markdown]
# A table and a verdict. They are a dict, too: the content of results.json.

# %%
print(results)
for row in results["rows"]:
    print(f"{row['method']:<25} {row['accuracy']['matched']:6.1%}  harms {row['clearly_harmed_clients']}")

# %% tags=["active-ipynb"]
# results
