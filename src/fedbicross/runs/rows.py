"""From predictors to rows: one pass over the test set, three protocols, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedbicross import parts
from fedbicross.bundle import pack, unpack
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, Record
from fedbicross.evaluate import clinical
from fedbicross.evaluate.protocols import PROTOCOLS, TestSet, compare_client, score_client, score_patients, subsets
from fedbicross.evaluate.summary import reference, summarise
from fedbicross.federation import records, round_records, travelled
from fedbicross.messages import Client, Predictor, file_name
from fedbicross.methods.base import Method
from fedbicross.settings import Settings, read_json

if TYPE_CHECKING:
    from fedbicross.context import Store
    from fedbicross.engine.predict import Answers


Predictions = Mapping[str, np.ndarray]  # probabilities [n,C] of each client's model on the whole test set


class _RoundScore(Settings):
    """Accuracy after one of several rounds."""

    round: int
    accuracy: dict[str, float | None]


@dataclass(frozen=True)
class Alone:
    """Local training that the methods of one seed are measured against: its name, scores by client, and predictions."""

    spec: str
    scores: Sequence[Mapping[str, Any]]
    predictions: Predictions


def stored_predictions(clients: Sequence[Client], ctx: Context) -> dict[str, np.ndarray] | None:
    """What ``predict_all`` made earlier; None unless it finished."""
    found = {client.name: ctx.store.load(_predictions_file(ctx, client.name)) for client in clients}
    kept = {name: data for name, data in found.items() if data is not None}
    return {name: _probabilities(data) for name, data in kept.items()} if len(kept) == len(clients) else None


def predict_all(predictors: Mapping[str, Predictor], answers: Answers, ctx: Context) -> dict[str, np.ndarray]:
    """Probabilities of every client's predictor on the whole test set; equal predictors run once."""
    done: dict[int, bytes] = {}
    out = {}
    update = ctx.progress.start(f"testing {ctx.scope.partition('/')[2]}", len(predictors))
    for number, (client, predictor) in enumerate(predictors.items(), 1):
        name = _predictions_file(ctx, client)
        data = ctx.store.load(name) or done.get(id(predictor))
        if data is None:
            probabilities = answers.probabilities(predictor, ctx.store)
            data = pack("predictions", {"probabilities": torch.from_numpy(probabilities)}, {})
        done[id(predictor)] = data
        ctx.store.save(name, data)
        out[client] = _probabilities(data)
        update(number, "")
    return out


def adapt_all(
    predictors: Mapping[str, Predictor], test_images: np.ndarray, test: TestSet, owners: Mapping[str, int], ctx: Context
) -> dict[str, Predictor]:
    """Each model under the class mix of the test images that are dealt to its client, whose labels nobody looks at."""
    out = dict(predictors)
    for client, predictor in predictors.items():
        rows = test.owner == owners[client]
        if rows.any():
            out[client] = parts.class_mix.adapt_prior(predictor, test_images[rows], ctx.device, ctx.store)
    return out


def choose_thresholds(predictors: Mapping[str, Predictor], clients: Sequence[Client], ctx: Context) -> None:
    """From which probability on each client should say yes to a class, by images that its training held back."""
    name, found = _thresholds_file(ctx), {}
    if ctx.store.load(name) is not None:
        return
    for client in clients:
        predictor = predictors[client.name]
        on_features = predictor.encoder is not None
        rows = parts.heads.held_back(client, ctx) if on_features else ctx.validation_rows(client)
        if len(rows):
            answers = predictor.probabilities(client.images[rows], ctx.device, store=ctx.store)
            found[client.name] = clinical.thresholds(answers, client.labels[rows])
    ctx.store.save(name, canonical_json({"clients": found}).encode())


class _Thresholds(Settings):
    """By client one for each class, none where there were too few images."""

    clients: dict[str, list[float | None]]


def _thresholds_file(ctx: Context) -> str:
    return f"thresholds/{ctx.scope}.json"


def _predictions_file(ctx: Context, client: str) -> str:
    return f"predictions/{ctx.scope}/{file_name(client)}.safetensors"


def _probabilities(data: bytes) -> np.ndarray:
    found: np.ndarray = unpack(data, "predictions")[0]["probabilities"].numpy()
    return found


def choose_alone(
    found: Mapping[str, Predictions],
    clients: Sequence[Client],
    test: TestSet,
    owners: Mapping[str, int],
    classes: int,
    metric: str,
) -> Alone | None:
    """Of all ways of training alone the one that sets the bar (`evaluate.summary.reference`)."""
    scores = {spec: _scores(clients, predictions, test, owners, classes) for spec, predictions in found.items()}
    spec = reference(scores, metric)
    return None if spec is None else Alone(spec, scores[spec], found[spec])


def _scores(
    clients: Sequence[Client], predictions: Predictions, test: TestSet, owners: Mapping[str, int], classes: int
) -> list[dict[str, Any]]:
    return [
        {
            "client": client.name,
            **score_client(predictions[client.name], test, owners[client.name], np.array(client.class_counts(classes))),
        }
        for client in clients
    ]


def score_round(
    number: int,
    predictors: Mapping[str, Predictor],
    clients: Sequence[Client],
    test_images: np.ndarray,
    test: TestSet,
    owners: Mapping[str, int],
    ctx: Context,
) -> None:
    """Accuracy after one of several rounds, for the report. Nothing is chosen by it: the row is the last round's."""
    name = f"rounds/{ctx.scope}/round-{number:03d}.json"
    if ctx.store.load(name) is not None:
        return
    done: dict[int, np.ndarray] = {}
    found: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
    for client in clients:
        predictor = predictors[client.name]
        if id(predictor) not in done:
            done[id(predictor)] = predictor.probabilities(test_images, ctx.device)
        right = done[id(predictor)].argmax(1) == test.labels
        counts = np.array(client.class_counts(len(ctx.task.classes)))
        for protocol, mask in subsets(test, owners[client.name], counts).items():
            if mask.any():
                found[protocol].append(float(right[mask].mean()))
    accuracy = {protocol: float(np.mean(values)) if values else None for protocol, values in found.items()}
    ctx.store.save(name, canonical_json({"round": number, "accuracy": accuracy}).encode())


def _by_round(ctx: Context, rounds: int) -> list[dict[str, Any]]:
    names = [f"rounds/{ctx.scope}/round-{number:03d}.json" for number in range(1, rounds + 1)] if rounds > 1 else []
    found = {name: ctx.store.load(name) for name in names}
    return [read_json(_RoundScore, data, name).model_dump() for name, data in found.items() if data is not None]


def make_row(
    spec: str,
    method: Method[Any],
    clients: Sequence[Client],
    predictions: Predictions,
    test: TestSet,
    owners: Mapping[str, int],
    ctx: Context,
    alone: Alone | None,
    role: str,
) -> dict[str, Any]:
    """One row of results.json, without clock times, so that the same run gives the same bytes.

    ``alone`` is what it is measured against; none in a run where nobody trains alone.
    """
    scores = _scores(clients, predictions, test, owners, len(ctx.task.classes))
    kept = ctx.store.load(_thresholds_file(ctx))  # none where the model was trained on all images
    cuts = {} if kept is None else read_json(_Thresholds, kept, _thresholds_file(ctx)).clients
    for client, score in zip(clients, scores, strict=True):
        own = None if alone is None else alone.predictions[client.name]
        counts = np.array(client.class_counts(len(ctx.task.classes)))
        score["model"] = ctx.model_of(client)
        score["patients"] = score_patients(predictions[client.name], test, owners[client.name], counts)
        score["thresholds"] = cuts.get(client.name)
        score["against_alone"] = (
            None if own is None else compare_client(predictions[client.name], own, test, owners[client.name])
        )
        score.update(_travel(method, client, ctx))
    said = records(ctx, [client.name for client in clients], method.rounds)
    return {
        "method": spec,
        "seed": ctx.seed,
        "role": role,
        "alone": None if alone is None else alone.spec,
        **summarise(scores, [len(client.labels) for client in clients], None if alone is None else alone.scores),
        "clinical": clinical.describe(
            [predictions[client.name] for client in clients],
            test.labels,
            [test.owner == owners[client.name] for client in clients],
            [cuts.get(client.name, []) for client in clients],
        ),
        "num_clients": len(clients),
        "upload_bytes": sum(score["upload_bytes"] for score in scores),
        "reply_bytes": sum(score["reply_bytes"] for score in scores),
        "client_flops": _flops(ctx, clients, method, "client"),
        "server_flops": _flops(ctx, clients, method, "server"),
        "rounds": method.rounds,
        "accuracy_by_round": _by_round(ctx, method.rounds),
        "settings": method.config.model_dump(),
        "leaves_the_hospital": method.leaves(ctx.training),
        "warnings": list(dict.fromkeys(w for record in said for w in record["warnings"])),
        "diagnosis": _merge_diagnosis(said),
    }


def _travel(method: Method[Any], client: Client, ctx: Context) -> dict[str, int]:
    """Upload and reply bytes of this client, over all rounds."""
    if method.pools_data:  # what would have to be sent
        return {"upload_bytes": int(client.images.nbytes + len(client.labels)), "reply_bytes": 0}
    if method.rounds == 1:
        sent, received = travelled(ctx, ctx.scope, client.name)
    else:
        trips = [record["bytes"][client.name] for record in round_records(ctx, method.rounds)]
        sent, received = sum(trip[0] for trip in trips), sum(trip[1] for trip in trips)
    return {"upload_bytes": sent, "reply_bytes": received}


def _flops(ctx: Context, clients: Sequence[Client], method: Method[Any], side: str) -> int:
    """Arithmetic of all clients, or of the server, over all rounds."""
    rounds = sum(int(record[f"{side}_flops"]) for record in round_records(ctx, method.rounds))
    if side == "server":
        return rounds or _recorded(ctx.store, f"records/fuse/{ctx.scope}/server.json")
    names = [file_name(client.name) for client in clients]
    uploads = sum(_recorded(ctx.store, f"records/upload/{ctx.scope}/{name}.json") for name in names)
    names.append("all-sites-pooled")
    own = sum(_recorded(ctx.store, f"records/personalize/{ctx.scope}/{name}.json") for name in names)
    return rounds + uploads + own


def _recorded(store: Store, name: str) -> int:
    data = store.load(name)
    return 0 if data is None else read_json(Record, data, name).flops


def _merge_diagnosis(kept: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for record in kept:
        for kind, entries in record["diagnosis"].items():
            out.setdefault(kind, {}).update(entries)
    return out


def seconds_by_stage(
    events: Sequence[Mapping[str, Any]], ctx: Context, row_records: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Wall time of a method from the event log: shared local training counted in full, then its own verbs."""
    latest = {
        (e["event"], e.get("name")): e["seconds"] for e in events if e.get("scope") == ctx.scope and "seconds" in e
    }
    trained = {e["key"]: e["seconds"] for e in events if e.get("event") == "trained"}
    for e in events:  # features too are computed once and shared; later events only read them
        if e.get("event") == "encoded":
            trained[e["key"]] = max(trained.get(e["key"], 0.0), e["seconds"])
    keys = {key for record in row_records for key in record["local_models"]}
    out = {"local_training": sum(trained.get(key, 0.0) for key in sorted(keys))}
    partial = [e for e in events if e.get("event") == "partial" and e["scope"] == ctx.scope]
    for verb in ("upload", "fuse", "personalize", "evaluate"):
        out[verb] = sum(seconds for (event, _), seconds in latest.items() if event == verb)
        out[verb] += sum(
            e["seconds"] for e in partial if e["verb"] == verb
        )  # up to each checkpoint, also before a kill
    return {stage: round(float(value), 3) for stage, value in out.items()}
