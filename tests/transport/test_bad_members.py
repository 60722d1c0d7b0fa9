"""A listed site that signs nonsense is refused by name, before anything is begun, and the others go on without it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbicross import pipeline
from fedbicross.bundle import audit, sign
from fedbicross.context import Context
from fedbicross.errors import ConfigError, FedBiCrossError, MethodError, RunError, UploadError
from fedbicross.messages import Reply, Upload
from fedbicross.methods.fedavg import FedAvg
from fedbicross.parts import moments
from fedbicross.runs.store import DiskStore
from fedbicross.steps import sufficient_statistics
from fedbicross.transport import files
from fedbicross.transport.server import FUSION
from small import TINY_METHODS, later, refuses
from transport.sites import Said, Sites, make_sites

BAD = "client-0"  # the first by name: it must not become the measure of the others


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Sites, dict[str, Upload]]]:
    """Three sites of a method and their honest uploads, made once."""
    known: dict[str, tuple[Sites, dict[str, Upload]]] = {}

    def make(spec: str) -> tuple[Sites, dict[str, Upload]]:
        if spec not in known:
            method_name, _, sends = spec.partition(" ")
            settings = {k: v for k, v in TINY_METHODS.get(re.split("[: ]", spec)[0], {}).items() if k != "clusters"}
            settings |= {"send": sends} if sends else {}
            sites = make_sites(method_name, settings=settings, quorum=2, class_counts={"smallest": 0})
            method, ctx = sites.federation.build(), sites.simulation()
            known[spec] = sites, {client.name: method.upload(client, ctx) for client in sites.clients}
        return known[spec]

    return make


def signed(sites: Sites, upload: Upload, name: str | None = None) -> bytes:
    agreed = {"run_id": sites.federation.run, "agreement": sites.federation.agreement}
    return sign(replace(upload, **agreed).pack(), sites.client_keys[name or upload.client])


def changed(upload: Upload, extra: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Upload:
    return replace(upload, tensors={**upload.tensors, **tensors}, extra={**upload.extra, **(extra or {})})


def other_encoder(upload: Upload) -> Upload:
    return changed(upload, {"encoder": {**upload.extra["encoder"], "digest": "0" * 64}})


def full(name: str, value: float) -> Callable[[Upload], Upload]:
    return lambda upload: changed(upload, **{name: torch.full_like(upload.tensors[name], value)})


def overflowing(upload: Upload) -> Upload:
    """Weights and statistics that are each within their limits."""
    tensors = {}
    for name, value in upload.tensors.items():
        tensors[name] = value
        if name.endswith("running_var"):
            tensors[name] = torch.full_like(value, 1e-12)
        elif value.is_floating_point() and not name.endswith("running_mean"):
            tensors[name] = value.sign() * 1e6
    return replace(upload, tensors=tensors)


def wider(upload: Upload) -> Upload:
    sums, extra = upload.tensors["class_sums"], torch.zeros(len(upload.tensors["class_sums"]), 1)
    width = sums.shape[1]
    gram = torch.cat([upload.tensors["gram"], torch.zeros(width + 1, dtype=torch.float64)])
    return changed(upload, class_sums=torch.cat([sums, extra.double()], 1), gram=gram)


def no_moments(upload: Upload) -> Upload:
    """A diagonal that some images have, and products that none have."""
    width = upload.tensors["class_sums"].shape[1]
    rows, columns = torch.tril_indices(width, width)
    gram = upload.tensors["gram"].clone()
    gram[rows != columns] *= -3
    return changed(upload, gram=gram)


CASES: list[tuple[str, Callable[[Upload], Upload], str]] = [
    ("falcon", other_encoder, "encoder_mismatch"),
    ("fedcgs", other_encoder, "encoder_mismatch"),
    ("fedpft", other_encoder, "encoder_mismatch"),
    ("analytic", other_encoder, "encoder_mismatch"),
    ("fedcgs", wider, "feature_width"),
    ("fedcgs", full("gram", 1e300), "magnitude"),
    ("fedcgs", no_moments, "bad_statistics"),
    ("fedpft", full("means", 3e38), "magnitude"),
    ("falcon sequences", full("sequences", 3e38), "magnitude"),
    ("falcon generator", full("generator.scale.scale", 3e38), "magnitude"),
    ("falcon generator", full("generator.scale.scale", 9e5), "answers"),
    ("falcon", lambda upload: changed(upload, {"dim": True}), "falcon_manifest"),
    ("falcon", lambda upload: changed(upload, {"tokens": True}), "falcon_manifest"),
    ("fedbicross:k2", overflowing, "answers"),
    ("ensemble", overflowing, "answers"),
    ("fedavg", overflowing, "answers"),
    ("falcon", lambda upload: replace(upload, num_samples=-1), "num_samples"),
    ("falcon", lambda upload: replace(upload, num_samples=10**30), "num_samples"),
    ("fedcgs", lambda upload: replace(upload, num_samples=-1), "num_samples"),
    ("fedpft", lambda upload: replace(upload, class_counts=[10**10, *(upload.class_counts or ())[1:]]), "class_counts"),
]


@pytest.mark.parametrize(("spec", "forge", "code"), CASES)
def test_one_bad_upload_is_refused_by_name_and_the_others_are_fused(
    spec: str, forge: Callable[[Upload], Upload], code: str, made: Any, tmp_path: Path
) -> None:
    sites, honest = made(spec)
    sent = {name: signed(sites, upload) for name, upload in honest.items()}
    sent[BAD] = signed(sites, forge(honest[BAD]))
    paths = []
    for name, data in sent.items():
        paths.append(tmp_path / f"{name}.safetensors")
        paths[-1].write_bytes(data)
    found = files.verify_files(sites.federation, paths)
    assert [(path.stem, error and error.code) for path, _, error in found if error] == [(BAD, code)], "verify says so"
    assert BAD in str(next(error for _, _, error in found if error)) or code == "num_samples" or code == "class_counts"
    replies = sites.fuse(sent, tmp_path / "server")
    assert sorted(replies) == ["client-1", "client-2"]
    assert not (tmp_path / "server" / "uploads" / f"{BAD}.safetensors").exists()
    method, ctx = sites.federation.build(), sites.simulation()
    expected = method.fuse([honest["client-1"], honest["client-2"]], ctx)
    opened = files.open_reply(sites.federation, replies["client-1"], "client-1")
    assert all(torch.equal(opened.tensors[name], value) for name, value in expected[0].tensors.items())


@pytest.mark.parametrize("value", [True, 1.0, "24", -1, 0, 10**30])
def test_numbers_of_images_are_whole_and_possible(value: Any, made: Any) -> None:
    for spec, field in (("fedavg", "num_samples"), ("ensemble:class_weighted", "class_counts")):
        if field == "class_counts" and value == 0:
            continue
        sites, honest = made(spec)
        given = value if field == "num_samples" else [value, 3, 3]
        upload = replace(honest[BAD], **{field: given})
        with pytest.raises(UploadError) as caught:
            files.verify_upload(sites.federation, signed(sites, upload))
        assert caught.value.code in (field, "manifest")


def test_where_nobody_has_more_than_half_behind_him_nothing_is_begun(made: Any, tmp_path: Path) -> None:
    sites, honest = made("fedcgs")
    two = {name: honest[name] for name in ("client-0", "client-1")}
    sent = {BAD: signed(sites, other_encoder(two[BAD])), "client-1": signed(sites, two["client-1"])}
    with pytest.raises(MethodError) as caught:
        sites.fuse(sent, tmp_path)
    assert caught.value.code == "quorum" and not (tmp_path / FUSION).exists()
    better = {**sent, BAD: signed(sites, honest[BAD])}
    assert len(sites.fuse(better, tmp_path)) == 2, "the same folder"


LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
FAILURES = [
    UploadError("diverged", "no"), MethodError("diverged", "no"), ZeroDivisionError("no"), KeyError("no"),
    AttributeError("no"), LinAlgError("singular"),
]  # fmt: skip


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_a_fusion_that_fails_binds_nobody(
    error: Exception, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever no check foresaw: without the file at fault, the same command in the same folder goes through."""
    sites, honest = made("fedavg")
    fuse = FedAvg.fuse

    def picky(self: FedAvg, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        if BAD in [upload.client for upload in uploads]:
            raise error
        return fuse(self, uploads, ctx)

    monkeypatch.setattr(FedAvg, "fuse", picky)
    sent = {name: signed(sites, upload) for name, upload in honest.items()}
    with pytest.raises(FedBiCrossError) as caught:
        sites.fuse(sent, tmp_path)
    assert caught.value.code == ("diverged" if isinstance(error, FedBiCrossError) else "unexpected")
    assert not (tmp_path / FUSION).exists()
    entries = [json.loads(line)["event"] for line in (tmp_path / files.AUDIT).read_text().splitlines()]
    assert any(entry.get("what") == "failed" and entry.get("code") == caught.value.code for entry in entries)
    del sent[BAD]
    assert sorted(sites.fuse(sent, tmp_path)) == ["client-1", "client-2"]
    audit.verify(tmp_path / files.AUDIT)


def test_replies_that_nobody_could_use_bind_nobody(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites, honest = made("fedavg")
    fuse = FedAvg.fuse

    def spoilt(self: FedAvg, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        replies = fuse(self, uploads, ctx)
        if BAD not in [upload.client for upload in uploads]:
            return replies
        return [
            replace(reply, tensors={**reply.tensors, "head.bias": torch.full((3,), torch.nan)}) for reply in replies
        ]

    monkeypatch.setattr(FedAvg, "fuse", spoilt)
    sent = {name: signed(sites, upload) for name, upload in honest.items()}
    with refuses(MethodError, "non_finite"):
        sites.fuse(sent, tmp_path)
    assert not (tmp_path / FUSION).exists()
    del sent[BAD]
    assert sorted(sites.fuse(sent, tmp_path)) == ["client-1", "client-2"]


def test_killed_while_it_lets_go_of_the_uploads_no_old_reply_is_handed_out(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, honest = made("fedavg")
    sent = {name: signed(sites, upload) for name, upload in honest.items()}
    before = sites.fuse(sent, tmp_path)
    (tmp_path / "replies" / f"{BAD}.safetensors").unlink()
    drop = DiskStore.drop

    def killed(self: DiskStore, prefix: str) -> None:
        if prefix == "replies":
            raise KeyboardInterrupt
        drop(self, prefix)

    def failing(self: FedAvg, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        raise ZeroDivisionError("no")

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(FedAvg, "fuse", failing)
        patched.setattr(DiskStore, "drop", killed)
        sites.fuse(sent, tmp_path)
    del sent[BAD]
    with monkeypatch.context() as patched, refuses(MethodError, "unexpected"):
        patched.setattr(FedAvg, "fuse", failing)
        sites.fuse(sent, tmp_path)
    assert sites.fuse(sent, tmp_path)["client-1"] != before["client-1"]


def test_replies_made_before_a_fusion_failed_are_not_handed_out(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped between two replies, failed when it went on, and was begun again without one upload."""
    sites, honest = made("fedavg")
    sent = {name: signed(sites, upload) for name, upload in honest.items()}
    before = sites.fuse(sent, tmp_path)
    for name in (BAD, "client-2"):
        (tmp_path / "replies" / f"{name}.safetensors").unlink()
    with monkeypatch.context() as patched, pytest.raises(MethodError):
        patched.setattr(FedAvg, "fuse", lambda self, uploads, ctx: 1 / 0)
        sites.fuse(sent, tmp_path)
    del sent[BAD]
    after = sites.fuse(sent, tmp_path)
    assert sorted(after) == ["client-1", "client-2"] and after["client-1"] != before["client-1"]


class LostWorkerError(Exception):
    """Ray's errors are of no kind that Python knows."""


MACHINE = [
    torch.OutOfMemoryError("full"), RuntimeError("can't allocate memory"), MemoryError(), LostWorkerError("gone"),
]  # fmt: skip


@pytest.mark.parametrize("error", MACHINE, ids=repr)
def test_what_may_be_the_machines_fault_takes_no_work_away(
    error: Exception, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, honest = made("fedavg")
    fuse, errors = FedAvg.fuse, [error]

    def failing_once(self: FedAvg, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        if errors:
            raise errors.pop()
        return fuse(self, uploads, ctx)

    monkeypatch.setattr(FedAvg, "fuse", failing_once)
    sent = {name: signed(sites, upload) for name, upload in honest.items()}
    with pytest.raises(RunError, match=r"out of (GPU )?memory|the same command goes on"):
        sites.fuse(sent, tmp_path)
    assert (tmp_path / FUSION).exists()
    assert len(sites.fuse(sent, tmp_path)) == 3


def more_than_there_is() -> None:
    torch.empty(1 << 50)


def nothing_left() -> None:
    raise MemoryError


def full_gpu() -> None:
    raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("full", [more_than_there_is, nothing_left, full_gpu])
def test_no_site_is_refused_for_what_the_machine_lacks(
    full: Callable[[], None], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, honest = made("fedavg")
    monkeypatch.setattr(FedAvg, "check_upload", lambda self, upload: full())
    with refuses(RunError, "out_of_memory"):
        files.verify_upload(sites.federation, signed(sites, honest[BAD]))


def test_what_a_check_stumbles_over_is_refused_by_name(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, honest = made("fedavg")
    check = FedAvg.check_upload

    def stumbling(self: FedAvg, upload: Upload) -> None:
        if upload.client == BAD:
            raise ZeroDivisionError("division by zero")
        check(self, upload)

    monkeypatch.setattr(FedAvg, "check_upload", stumbling)
    sent = {name: signed(sites, upload) for name, upload in honest.items()}
    with pytest.raises(UploadError, match=f"{BAD}.*ZeroDivisionError") as caught:
        files.verify_upload(sites.federation, sent[BAD])
    assert caught.value.code == "unexpected"
    assert sorted(sites.fuse(sent, tmp_path)) == ["client-1", "client-2"]


# --- what passes every check and still sticks out --------------------------------------------------------------------


def loud(upload: Upload) -> Upload:
    return changed(upload, **{name: 100 * upload.tensors[name] for name in ("head.weight", "head.bias")})


def with_loud(made: Any, spec: str = "fedavg") -> tuple[Sites, dict[str, Upload], dict[str, bytes]]:
    sites, honest = made(spec)
    sent = {name: signed(sites, loud(u) if name == BAD else u) for name, u in honest.items()}
    return sites, honest, sent


@pytest.mark.parametrize("spec", ["fedavg", "ensemble", "ensemble:class_weighted", "primum", "fedbicross:k2"])
def test_who_sticks_out_is_left_out_by_name_and_everybody_is_told(spec: str, made: Any, tmp_path: Path) -> None:
    sites, honest, sent = with_loud(made, spec)
    said = Said()
    replies = sites.fuse(sent, tmp_path, said)
    expected = sites.federation.build().fuse([honest["client-1"], honest["client-2"]], sites.simulation())
    for name, reply in zip(("client-1", "client-2"), expected, strict=True):
        opened = files.open_reply(sites.federation, replies[name], name)
        assert all(torch.equal(opened.tensors[key], value) for key, value in reply.tensors.items())
        (note,) = files.notes_in(opened)
        assert BAD in note and "left out of the fusion" in note
    assert sum("left out of the fusion" in line for line in said.lines) == 1, "said once"
    entries = [json.loads(line)["event"] for line in (tmp_path / files.AUDIT).read_text().splitlines()]
    assert [BAD in entry["reason"] for entry in entries if entry["what"] == "note"] == [True]
    again = sites.fuse(sent, tmp_path)
    assert again == replies


def five_thousand_times(upload: Upload) -> Upload:
    """As if of so many copies of each image, counters and sums too."""
    tensors = {name: 5000 * value for name, value in upload.tensors.items() if name in ("class_sums", "gram")}
    counters = {n: value + 10**6 for n, value in upload.tensors.items() if n.endswith("num_batches_tracked")}
    counts = upload.class_counts and [5000 * count for count in upload.class_counts]
    images = upload.num_samples and 5000 * upload.num_samples
    return replace(changed(upload, **tensors, **counters), class_counts=counts, num_samples=images)


BY_COUNTS = (
    "fedavg", "primum", "fedcgs",
    *later("ensemble:class_weighted", "fedbicross:class_weighted", "fedisca:class_weighted", "analytic"),
    *later("analytic:lda", "fedpft", "falcon:released"),
)  # fmt: skip


@pytest.mark.parametrize("spec", BY_COUNTS)
def test_a_site_of_so_many_images_counts_for_less_and_breaks_nothing(spec: str, made: Any, tmp_path: Path) -> None:
    sites, honest = made(spec)
    method, ctx = sites.federation.build(), sites.simulation()
    sent = [five_thousand_times(u) if name == BAD else u for name, u in honest.items()]
    seen = pipeline.look_at(method, sent, ctx)
    (note,) = seen.notes
    assert note.client == BAD and "1000 times as many count" in note.what and not note.left_out
    limited = next(upload for upload in seen.uploads if upload.client == BAD)
    pipeline.check_upload(method, limited, ctx.task)
    replies = sites.fuse({upload.client: signed(sites, upload) for upload in sent}, tmp_path)
    assert sorted(replies) == sorted(honest)


def test_a_small_number_beside_large_counts_hides_nothing(made: Any) -> None:
    sites, honest = made("fedcgs")
    sent = [five_thousand_times(u) if name == BAD else u for name, u in honest.items()]
    hidden = [replace(u, num_samples=1) if u.client == BAD else u for u in sent]
    method, ctx = sites.federation.build(), sites.simulation()
    assert pipeline.look_at(method, hidden, ctx).notes == pipeline.look_at(method, sent, ctx).notes != ()


def test_sums_that_only_just_are_none_cannot_end_the_fusion(made: Any) -> None:
    """Scatter with a negative eigenvalue so small that it once passed, and made the sum of all singular."""
    sites, honest = made("fedcgs")
    method, ctx, upload = sites.federation.build(), sites.simulation(), honest[BAD]
    width = upload.tensors["class_sums"].shape[1]
    shift = 3e-7 * torch.eye(width, dtype=torch.float64) * moments.statistics(upload).gram.diagonal().max()
    gram = upload.tensors["gram"] - sufficient_statistics.pack_triangle(shift)
    pipeline.check_upload(method, upload, ctx.task)
    with refuses(UploadError, "bad_statistics"):
        pipeline.check_upload(method, changed(upload, gram=gram), ctx.task)


def ten_thousand_times_as_long(upload: Upload) -> Upload:
    """As if of features that many times as long; each number is within the limits of the door."""
    powers = {"class_sums": 1, "gram": 2, "means": 1, "scales": 1, "sequences": 1, "generator.scale.scale": 1}
    tensors = {name: 1e4**power * upload.tensors[name] for name, power in powers.items() if name in upload.tensors}
    return changed(upload, **tensors)


@pytest.mark.parametrize("spec", ["fedcgs", "fedcgs:within", "fedpft", "falcon sequences", "falcon generator"])
def test_features_far_longer_than_the_others_are_left_out_by_name(spec: str, made: Any, tmp_path: Path) -> None:
    sites, honest = made(spec)
    sent = {name: signed(sites, ten_thousand_times_as_long(u) if name == BAD else u) for name, u in honest.items()}
    said = Said()
    replies = sites.fuse(sent, tmp_path, said)
    assert any(BAD in line and "times as long as the others'; it is left out" in line for line in said.lines)
    without = {name: data for name, data in sent.items() if name != BAD}
    expected = sites.fuse(without, tmp_path / "without")
    opened, wanted = (files.open_reply(sites.federation, one["client-1"], "client-1") for one in (replies, expected))
    assert all(torch.equal(opened.tensors[name], value) for name, value in wanted.tensors.items())


def test_features_of_all_others_of_one_encoder_are_alike(made: Any) -> None:
    for spec in ("fedcgs", "fedpft", "falcon sequences", "falcon generator", "analytic"):
        sites, honest = made(spec)
        method = sites.federation.build()
        lengths = [method.feature_length(upload) for upload in honest.values()]
        assert max(lengths) < 3 * min(lengths)


def identity_matrix(upload: Upload, value: float) -> torch.Tensor:
    width = upload.tensors["class_sums"].shape[1]
    return value * sufficient_statistics.pack_triangle(torch.eye(width, dtype=torch.float64))


FORGED: dict[str, Callable[[Upload], dict[str, torch.Tensor]]] = {
    "below what noise explains": lambda u: {"gram": identity_matrix(u, -1e3)},
    "longer than agreed on": lambda u: {"gram": u.tensors["gram"] + identity_matrix(u, 1e4)},
    "class sums of longer features": lambda u: {"class_sums": u.tensors["class_sums"] + 1e5},
}


@pytest.mark.parametrize("how", FORGED)
@pytest.mark.parametrize("spec", ["fedcgs:private", "analytic:private", "analytic"])
def test_sums_keep_to_the_length_that_was_agreed_on_and_to_the_noise(spec: str, how: str, made: Any) -> None:
    """Behind noise they once passed, and ended the fusion with numbers that are none, over nobody's name."""
    sites, honest = made(spec)
    method, ctx = sites.federation.build(), sites.simulation()
    for upload in honest.values():
        pipeline.check_upload(method, upload, ctx.task)
    with refuses(UploadError, "bad_statistics"):
        pipeline.check_upload(method, changed(honest[BAD], **FORGED[how](honest[BAD])), ctx.task)


def test_sums_of_many_images_that_differ_in_little_are_honest(made: Any) -> None:
    """A feature that is the same for all images leaves nothing but rounding, which grows with their number."""
    sites, honest = made("fedcgs")
    width, images = 8, 20_000
    features = torch.zeros(images, width, dtype=torch.float64)
    features[:, 0], features[:, 1] = 1.7, torch.arange(images) % 7 / 3
    found = sufficient_statistics.statistics(features, torch.arange(images) % 3, 3)
    sums = {"class_sums": found.class_sums, "gram": sufficient_statistics.pack_triangle(found.gram)}
    upload = replace(changed(honest[BAD], **sums), class_counts=[int(count) for count in found.counts])
    pipeline.check_upload(sites.federation.build(), upload, sites.simulation().task)


def test_a_site_of_a_long_name_can_be_trusted(tmp_path: Path) -> None:
    """Notes show the first 64 letters of a name; whom the operator trusts is known by all of it."""
    names = ("hospital " + "x" * 70 + " a", "hospital b", "hospital c")
    sites = make_sites("fedavg", names=names, quorum=2)
    method, ctx = sites.federation.build(), sites.simulation()
    honest = {client.name: method.upload(client, ctx) for client in sites.clients}
    sent = {name: signed(sites, loud(u) if name == names[0] else u) for name, u in honest.items()}
    with refuses(MethodError, "held"):
        sites.fuse(sent, tmp_path, hold_on_notes=True)
    assert len(sites.fuse(sent, tmp_path, hold_on_notes=True, trust=[names[0]])) == 3


def test_a_fusion_can_be_held_until_a_person_has_looked(made: Any, tmp_path: Path) -> None:
    sites, _, sent = with_loud(made)
    fuse = partial(files.fuse_uploads, sites.federation, server_key=sites.server_key, hold_on_notes=True)
    with pytest.raises(MethodError, match=BAD) as caught:
        fuse(sent, tmp_path)
    assert caught.value.code == "held" and not (tmp_path / FUSION).exists()
    without = {name: data for name, data in sent.items() if name != BAD}
    assert len(fuse(without, tmp_path)) == 2, "the same folder, without the file"
    trusted = fuse(sent, tmp_path / "trusted", trust=[BAD])
    kept = sites.fuse({}, tmp_path / "trusted")
    assert kept == trusted, "whom the operator trusts is kept with the uploads"
    uploads = [Upload.unpack(data) for data in sent.values()]
    expected = sites.federation.build().fuse(uploads, sites.simulation())[0]
    opened = files.open_reply(sites.federation, trusted[BAD], BAD)
    assert all(torch.equal(opened.tensors[name], value) for name, value in expected.tensors.items())
    with refuses(ConfigError, "not_listed"):
        fuse(sent, tmp_path / "other", trust=["client-7"])


def test_nobody_is_left_out_below_the_quorum(made: Any, tmp_path: Path) -> None:
    sites, _, sent = with_loud(made)
    with pytest.raises(MethodError) as caught:
        sites.fuse(sent, tmp_path, quorum=3)
    assert caught.value.code == "quorum" and not (tmp_path / FUSION).exists()


@pytest.mark.parametrize("notes", ["text", [1], {"a": 1}])
def test_notes_that_are_none_are_refused(notes: Any) -> None:
    with refuses(UploadError, "manifest"):
        files.notes_in(Reply({}, {"notes": notes}))
    shown = files.notes_in(Reply({}, {"notes": ["\x1b[2Jx" * 1000] * 1000}))
    assert len(shown) == 100 and len(shown[0]) == 1000 and "\x1b" not in shown[0]
