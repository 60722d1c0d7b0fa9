"""Three hospitals and a server that share nothing but a folder for files: keys, one upload, one reply, one model each.

Everything happens in temporary folders. ``python three_hospitals_by_files.py [images a hospital]``
"""

import sys
import tempfile
from pathlib import Path

import fedbicross
from fedbicross.bundle import keys
from fedbicross.context import Context
from fedbicross.messages import Client
from fedbicross.transport import files

count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
cells = fedbicross.load_dataset("cells", image_size=16, train_size=3 * count, test_size=200)
names = ("east", "north", "south")
hospitals = [Client(name, cells.train.images[i::3], cells.train.labels[i::3]) for i, name in enumerate(names)]

with tempfile.TemporaryDirectory() as folder:
    root, post = Path(folder), Path(folder) / "post"  # post: the memory stick, the only place that all can see
    post.mkdir()

    # Before anything: each makes a key at home and gives away only the public half.
    for name in (*names, "server"):
        (root / name).mkdir()
        keys.save_private_key(root / name / "private.key", keys.generate_key())
    own_key = {name: keys.load_private_key(root / name / "private.key") for name in (*names, "server")}
    federation = files.new_federation(
        classes=cells.classes,
        image_size=cells.image_size,
        model="resnet8",
        method="fedbicross:k2",
        settings={"steps": 10, "batch": 16, "probes": 16, "epochs_personal": 2},  # a rehearsal
        training={"recipe": "modern", "epochs": 2, "batch_size": 32},
        server=keys.public_text(own_key["server"]),
        clients={name: keys.public_text(own_key[name]) for name in names},
    )
    (post / "federation.toml").write_text(files.federation_text(federation))
    print("fingerprint to compare by telephone:", federation.fingerprint)

    for hospital in hospitals:  # at each hospital: train, sign, send
        agreed = files.load_federation(post / "federation.toml")
        upload = files.make_upload(agreed, hospital, own_key[hospital.name], root / hospital.name / "work")
        (post / f"{hospital.name}.upload.safetensors").write_bytes(upload)

    # At the server, which sees no image: verify every file, fuse, sign one reply for each.
    sent = {path.name: path for path in sorted(post.glob("*.upload.safetensors"))}
    for name, reply in files.fuse_uploads(federation, sent, root / "server" / "work", own_key["server"]).items():
        (post / f"{name}.reply.safetensors").write_bytes(reply)

    simulated = fedbicross.simulate(federation.build(), hospitals, Context(federation.task, federation.training))
    for hospital in hospitals:  # at each hospital again: verify the reply, make the own model
        reply = (post / f"{hospital.name}.reply.safetensors").read_bytes()
        model = files.personalize(federation, hospital, reply, root / hospital.name / "work")
        right = (model.probabilities(cells.test.images).argmax(1) == cells.test.labels).mean()
        same = model.pack() == simulated[hospital.name].pack()
        print(f"{hospital.name}: {right:.1%} of {len(cells.test)} test images; same bytes as a simulation: {same}")
