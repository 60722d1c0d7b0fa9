"""Was taking part worth it? The answer in plain words, made from the rows and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedbicross.evaluate.summary import ALONE
from fedbicross.report.summary import Summary, local_summary, seeds_of
from fedbicross.report.text import count, percent, percent_sd, points, short

UPPER_BOUND = "upper bound: pools the data, not federated"


@dataclass(frozen=True)
class Verdict:
    """``kind`` is good, mixed, bad or unknown; ``sentences`` follow the headline, ``cautions`` are smaller."""

    kind: str
    badge: str
    headline: str
    sentences: tuple[str, ...]
    cautions: tuple[str, ...]
    best: Summary | None


def harm_words(item: Summary, noun: str = "client", seeds: bool = True) -> str | None:
    """``harms 3 of 5 clients``, ``no client harmed``, or None where it was not measured."""
    if item.harmed is None or item.is_local:
        return None
    over = f" ({item.seeds} seeds)" if seeds and item.seeds > 1 else ""
    if item.harmed == 0:
        return f"no {noun} harmed{over}"
    return f"harms {item.harmed} of {item.judged} {noun}{'' if item.judged == 1 else 's'}{over}"


def row_verdict(item: Summary) -> list[str]:
    """What the table says about a method, in words: losing to training alone is never left to colour."""
    if item.is_local:
        return ["the reference: training alone"]
    words = [UPPER_BOUND] if item.role == "upper_bound" else []
    if item.loses:
        words.append(f"loses to training alone by {points(-(item.gain.mean or 0)).lstrip('+')} points")
    elif item.beats:
        words.append(f"beats training alone by {points(item.gain.mean).lstrip('+')} points")
    elif item.gain.mean is not None:
        words.append("level with training alone")
    harm = harm_words(item)
    if harm and item.role != "upper_bound":
        words.append(harm)
    return words or ["not compared: nobody trained alone"]


def candidates_of(summaries: list[Summary]) -> tuple[list[Summary], str]:
    """What is being judged: the methods or, in a run of baselines only, the baselines that share something."""
    sharing = [
        item for item in summaries if item.method.split(":")[0] not in ("majority", *ALONE) and not item.is_local
    ]
    methods = [item for item in sharing if item.role not in ("baseline", "upper_bound")]
    if methods:
        return methods, "method"
    return [item for item in sharing if item.role == "baseline"], "baseline"


def judge(results: Mapping[str, Any], summaries: list[Summary]) -> Verdict:
    """The verdict for a whole run, under the matched protocol."""
    local = local_summary(summaries)
    candidates, noun = candidates_of(summaries)
    compared = [item for item in candidates if item.gain.mean is not None]
    if not compared or local is None:
        return _unknown(local, candidates)
    winners = [item for item in compared if item.beats]
    # A gain that costs nobody comes before a larger one that does.
    best = min(winners or compared, key=lambda item: (_harm_rate(item) if winners else 0, -(item.gain.mean or 0)))
    kind, badge, headline = _headline(best, winners, noun)
    badge = badge if results.get("complete") is True else f"So far: {badge.lower()}"
    sentences = (_alone(local, compared, winners, noun), *_harms(compared), *_elsewhere(local, compared))
    return Verdict(kind, badge, headline, sentences, _cautions(results, best, compared), best)


def _headline(best: Summary, winners: list[Summary], noun: str) -> tuple[str, str, str]:
    """Kind, badge and headline: better on average is not enough, it must hold for every hospital and every seed."""
    name, harm = short(best.method), harm_words(best, "hospital")
    if not winners and best.loses:
        words = f"Taking part was not worth it: no {noun} beats training alone on a hospital’s own patients."
        return "bad", "Not worth it", words
    if not winners:
        words = f"Taking part brought nothing: the best {noun}, {name}, is level with training alone"
        return ("bad", "Not worth it", f"{words} and {harm}.") if best.harmed else ("mixed", "No gain", f"{words}.")
    gain = f"{points(best.gain.mean).lstrip('+')} points"
    ahead = sum(value > 0 for value in best.gains if value is not None)
    if best.harmed is None:
        words = f"{name} gains {gain} over training alone on average; whom it harms was not measured."
        return "mixed", "Gain, harm unknown", words
    if best.harmed:
        words = f"Taking part paid on average, not for everyone: {name} gains {gain} but {harm}."
        return "mixed", "Mixed", words
    if ahead < best.gain.count:
        words = f"Taking part paid in {ahead} of {best.gain.count} seeds: {name} gains {gain} on average."
        return "mixed", "Mixed", words
    return (
        "good",
        "Worth it",
        f"Taking part was worth it: {name} gains {gain} over training alone and harms no hospital.",
    )


def _harm_rate(item: Summary) -> float:
    return 1.0 if item.harmed is None else item.harmed / max(item.judged, 1)


def _alone(local: Summary, compared: list[Summary], winners: list[Summary], noun: str) -> str:
    reach = percent_sd(local.accuracy["matched"])
    beaten = {0: "none beats it", 1: "1 beats it"}.get(len(winners), f"{len(winners)} beat it")
    return (
        "Under the matched protocol – each hospital’s own patient mix – training alone reaches "
        f"{reach}\u00a0%. Of {count(len(compared), noun)}, {beaten} on average."
    )


def _harms(compared: list[Summary]) -> list[str]:
    """Who pays, worst first; a long list is cut, since the table below has all of them."""
    harmful = sorted((item for item in compared if item.harmed), key=lambda item: -_harm_rate(item))
    if not harmful:
        return ["No method harmed any hospital."] if all(item.harmed == 0 for item in compared) else []
    parts = [f"{short(item.method)} {harm_words(item, 'hospital', seeds=False)}" for item in harmful[:4]]
    more = f"; {len(harmful) - 4} more also harm some" if len(harmful) > 4 else ""
    seeds = max(item.seeds for item in harmful)
    return ["; ".join(parts) + more + (f" (hospitals counted over {seeds} seeds)." if seeds > 1 else ".")]


def _elsewhere(local: Summary, compared: list[Summary]) -> list[str]:
    """The other side of the bargain: patients unlike the hospital's own."""
    alone = local.accuracy["global"].mean
    others = [item for item in compared if item.accuracy["global"].mean is not None]
    if alone is None or not others:
        return []
    best = max(others, key=lambda item: item.accuracy["global"].mean or 0)
    there = best.accuracy["global"].mean or 0
    mine, theirs = f"training alone reaches {percent(alone)}\u00a0%", f"{percent(there)}\u00a0%"
    lead = (
        f"{mine}, {short(best.method)} {theirs}"
        if there >= alone
        else f"{mine}, the best of the others ({short(best.method)}) {theirs}"
    )
    return [f"For patients from everywhere (global protocol) {lead}."]


def _cautions(results: Mapping[str, Any], best: Summary, compared: list[Summary]) -> tuple[str, ...]:
    notes = []
    seeds = best.gain.count
    if seeds == 1:
        notes.append("One seed only: a difference of a point or so may be chance.")
    else:
        better = sum(gain > 0 for gain in best.gains if gain is not None)
        notes.append(
            f"{short(best.method)} is ahead of training alone in {better} of {seeds} seeds; "
            f"its gain is {points(best.gain.mean)} ± {points(best.gain.sd).lstrip('+')} points (mean ± sd)."
        )
    if len(compared) > 1:
        notes.append("The best of several is named after looking at the test images, which flatters it a little.")
    total = len(seeds_of(results))
    behind = [short(item.method) for item in compared if item.seeds < total]
    if behind:
        notes.append(
            f"Not all seeds are finished for {', '.join(behind[:4])}{' and others' if len(behind) > 4 else ''}."
        )
    return tuple(notes)


def _unknown(local: Summary | None, candidates: list[Summary]) -> Verdict:
    if local is None:
        headline = "Whether taking part was worth it cannot be said: this run has no local_only row to compare with."
        advice = "Add local_only (on a frozen encoder local_head): it is what a hospital has without taking part."
    elif not candidates:
        headline = "Nothing to judge yet: this run holds no method beside the baselines."
        advice = f"Training alone reaches {percent_sd(local.accuracy['matched'])}\u00a0% under the matched protocol."
    else:
        headline = "Whether taking part was worth it cannot be said: no method shares a matched result with it."
        advice = "The matched protocol needs test images in the classes that the clients train on."
    return Verdict("unknown", "Cannot be judged", headline, (advice,), (), None)
