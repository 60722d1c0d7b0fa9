"""`fedbicross client`: what a hospital does. Keys, training, a look at what leaves; the final model and its use."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedbicross import bundle, deploy, disclosure, engine, parts, privacy, transport
from fedbicross.cli import common, describe_bundle, join, models, page, site
from fedbicross.cli.models import AdaptOption
from fedbicross.cli.show import print_json
from fedbicross.errors import DataError
from fedbicross.methods.base import RECEIVES

app = typer.Typer(help="What a hospital does: train, send, receive, use.", no_args_is_help=True, rich_markup_mode=None)


class Which(StrEnum):
    """Which images are scored."""

    held_out = "held-out"
    all = "all"


@app.command()
def keygen(
    out: Annotated[Path, typer.Option(help="file of the private key; the public one gets the ending .pub")],
    json: common.JsonOption = False,
) -> None:
    """Make the site's key pair."""
    common.keygen(out, json)


@app.command()
def train(
    data: Annotated[str, typer.Option(help="folder of class folders, CSV manifest or .npz file")],
    key: Annotated[Path, typer.Option(help="the site's private key")],
    federation: common.FederationOption = common.FEDERATION,
    name: Annotated[str | None, typer.Option(help="the site's name (default: whose key this is)")] = None,
    out: Annotated[Path | None, typer.Option(help="the file to send (default: <name>.safetensors)")] = None,
    accept: common.AcceptOption = None,
    policy: common.PolicyOption = None,
    work: common.WorkOption = common.WORK,
    device: common.DeviceOption = "auto",
    threads: common.ThreadsOption = None,
    json: common.JsonOption = False,
) -> None:
    """Train on the site's own images and write the one file that leaves, if the site's policy lets it."""
    agreed = transport.files.load_federation(federation)
    rules = disclosure.policy.policy_here(policy)
    private = bundle.keys.load_private_key(key)
    who = name or common.owner(agreed, private, key)
    transport.files.check_key(agreed, who, private)
    target = out or Path(f"{transport.files.file_name(who)}.safetensors")
    kept = common.site_work(work, agreed, who) / transport.files.SENT
    common.check_new(target, kept.read_bytes() if kept.is_file() else None)  # before hours of training, not after
    common.set_threads(threads)
    sent = site.train(site.Site(agreed, who, data, work, device), private, accept or [], rules)
    common.write_new(target, sent)
    if json:
        print_json({"path": str(target), "client": who, "run": agreed.run, **describe_bundle.facts(sent)})
        return
    print(f"{target}: {len(sent):,} bytes, ready to be handed to the server of run {agreed.run_id}")
    method = agreed.build()
    print(f"what leaves: {method.leaves(agreed.training)}")
    print(f"others get:  {RECEIVES[method.others_receive]}")
    print(f"look at it:  fedbicross client show {target}")


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="an upload or a reply")],
    federation: common.FederationOption = common.FEDERATION,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    json: common.JsonOption = False,
) -> None:
    """Say in words what exactly a file holds; nothing in it is used."""
    data = bundle.read_file(file)
    header = bundle.inspect(data, bundle.REPLY)
    describe_bundle.check_readable(header)
    there = federation.is_file() or federation != common.FEDERATION
    agreed = transport.files.load_federation(federation) if there else None
    if json:
        print_json(describe_bundle.as_json(data, header, agreed))
        return
    common.print_table(str(file), ("what", "content"), describe_bundle.words(data, header, agreed))
    if tensors:
        rows = [
            (name, info.dtype, describe_bundle.shape_text(info.shape), f"{info.end - info.start:,}")
            for name, info in header.tensors.items()
        ]
        common.print_table("tensors", ("name", "type", "shape", "bytes"), rows)


@app.command()
def personalize(
    reply: Annotated[Path, typer.Option(help="the server's reply to this site")],
    data: Annotated[str, typer.Option(help="the same images as in `client train`")],
    out: Annotated[Path, typer.Option(help="folder of the final model")],
    federation: common.FederationOption = common.FEDERATION,
    name: Annotated[str | None, typer.Option(help="the site's name (default: the one that trained here)")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="also write model.onnx (needs the extra `onnx`)")] = False,
    work: common.WorkOption = common.WORK,
    device: common.DeviceOption = "auto",
    threads: common.ThreadsOption = None,
    json: common.JsonOption = False,
) -> None:
    """Make the site's final model from the server's reply, and test it on the images that were held out."""
    agreed = transport.files.load_federation(federation)
    who = common.site_name(agreed, work, name)
    received = bundle.read_file(reply)
    transport.files.open_reply(agreed, received, who)
    done = deploy.folder.written_before(out, received, who, onnx)
    if done is None:
        deploy.folder.check_absent(out)
        common.set_threads(threads)
        scores = site.finish(site.Site(agreed, who, data, work, device), received, out, onnx)
    else:
        scores = {key: done[key] for key in ("test", "alone", "comparison")}
    if json:
        print_json({"path": str(out), "client": who, **scores})
        return
    site.print_scores(f"{who}: on images that were held out", scores)
    before = "" if done is None else "done before: "
    print(f"{before}model: {out} (read {out / deploy.folder.CARD} before you use it)")


@app.command("privacy")
def privacy_of_site(work: common.WorkOption = common.WORK, json: common.JsonOption = False) -> None:
    """Everything that this site ever sent, and the differential privacy of all of it together."""
    entries = privacy.ledger.read(work / privacy.ledger.NAME)
    total = privacy.ledger.total(entries)
    if json:
        print_json({"entries": [entry.model_dump() for entry in entries], "total": total.as_json()})
        return
    rows = [
        (entry.time, entry.run, entry.client, entry.method, "none" if entry.privacy is None else entry.privacy.words)
        for entry in entries
    ]
    if rows:
        common.print_table("what this site sent", ("when (UTC)", "run", "as", "method", "differential privacy"), rows)
    print(f"all together: {total.words}")


app.command("predict")(models.predict)
app.command("join")(join.join)
app.command("inspect")(page.inspect)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Option(help="the folder that `client personalize` or `client join` wrote")],
    data: Annotated[str, typer.Option(help="images with labels: folder, CSV manifest or .npz file")],
    which: Annotated[Which, typer.Option(help="held-out: those never trained on, by the federation's rule")] = (
        Which.held_out
    ),
    adapt_prior: AdaptOption = False,
    device: common.DeviceOption = "auto",
    threads: common.ThreadsOption = None,
    json: common.JsonOption = False,
) -> None:
    """Accuracy, balanced accuracy, AUC, F1 and calibration of both models of a site, and which one to keep."""
    predictor = deploy.folder.load_model(model)
    settings = deploy.folder.read_settings(model)
    own = deploy.folder.load_model(model, alone=True) if settings["alone_sha256"] else None
    origin = settings["origin"]
    client, test = transport.site_data.load_site(data, predictor.task, "site", origin["hold_out"], origin["seed"])
    images, labels = test.images, test.labels
    if which is Which.all:
        images, labels = np.concatenate([client.images, images]), np.concatenate([client.labels, labels])
    if not len(labels):
        raise DataError("empty", f"{data} holds no images that were held out; --which all scores every image")
    used = engine.device.resolve_device(device)
    common.set_threads(threads)
    if adapt_prior:
        predictor = parts.class_mix.adapt_prior(predictor, images, used)
    answers = predictor.probabilities(images, used)
    if own is None:
        scores = {"test": deploy.compare.score(answers, labels), "alone": None, "comparison": None}
    else:
        scores = deploy.compare.both(answers, own.probabilities(images, used), labels)
    if json:
        print_json({"which": which.value, **scores})
        return
    site.print_scores(f"{which.value}: {len(labels):,} images of {data}", scores)
    if which is Which.all:
        print("note: where these images were trained on, the numbers are too good, and no advice")
