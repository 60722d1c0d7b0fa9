"""A method of your own in one file: share the trunk of the network, keep the last layer at home.

``python own_method.py [images a hospital]``
"""

import sys

import fedbicross
from fedbicross.bundle import validate
from fedbicross.context import Context, Task
from fedbicross.engine.recipe import Training
from fedbicross.federation import simulate
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, MethodConfig
from fedbicross.methods.fedavg import average


class KeepHead(Method[MethodConfig]):
    """The average of all trunks under each hospital's own last layer."""

    name = "keep_head"
    summary = "averaged trunk, own last layer"
    needs = frozenset({"weights"})
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


count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
data = fedbicross.load_dataset("cells", train_size=3 * count, test_size=300)
clients = [
    Client(name, data.train.images[i::3], data.train.labels[i::3]) for i, name in enumerate(("north", "south", "west"))
]
task = Task(data.classes, data.image_size, data.channels, "resnet8")
ctx = Context(task, Training(recipe="modern", epochs=4, batch_size=32))

for name, predictor in simulate(KeepHead(MethodConfig()), clients, ctx).items():
    answers = predictor.probabilities(data.test.images).argmax(1)
    print(f"{name}: {(answers == data.test.labels).mean():.1%} of {len(data.test)} test images")
