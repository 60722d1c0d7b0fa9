"""A method of your own in one file: share the trunk of the network, keep the last layer at home.

``IMAGES=40 python own_method.py`` takes forty images a hospital.
"""

# %%
import os

import fedbicross
from fedbicross import Method, MethodConfig, Predictor, Reply, Upload
from fedbicross.bundle import validate
from fedbicross.methods.fedavg import average


# %%
class KeepHead(Method[MethodConfig]):
    """The average of all trunks under each hospital's own last layer."""

    name = "keep_head"
    summary = "averaged trunk, own last layer"
    needs = frozenset({"weights"})
    others_receive = "one_model"
    upload_summary = "The trained network without its last layer."

    def upload(self, client, ctx, previous=None):
        state = ctx.local_model(client).state
        return Upload(client.name, ctx.task, {k: v for k, v in state.items() if not k.startswith("head.")})

    def check_upload(self, upload):  # what is no whole network needs a check of its own: here stands a trunk
        self.check_extra(upload)
        task = upload.task
        shape = task.channels, len(task.classes), task.image_size
        validate.check_model_state(upload.tensors, task.model, *shape, without="head.")

    def fuse(self, uploads, ctx):
        reply = Reply(average([dict(upload.tensors) for upload in uploads], [1.0] * len(uploads)))
        return [reply for _ in uploads]

    def personalize(self, client, reply, ctx):
        own = ctx.local_model(client).state  # trained once, kept: this does not train again
        return Predictor(ctx.task, (ctx.task.model,), ({**own, **reply.tensors},))


# %% [markdown]
# It stands beside any other method. With `out=...` the run is kept, and `fedbicross.resume(out, methods=[KeepHead])`
# goes on with it; an entry point of your package makes it known to the command line as well.

# %%
count = int(os.environ.get("IMAGES", "300"))
results = fedbicross.run(
    "cells",
    data={"train_size": 3 * count, "test_size": 300},
    methods=[KeepHead, "fedavg"],
    clients=3,
    model="resnet8",
    training={"recipe": "modern", "epochs": 4, "batch_size": 32},
)
print(results)
