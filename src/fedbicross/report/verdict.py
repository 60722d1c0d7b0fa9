"""Was taking part worth it? The answer in plain words, made from the rows and from nothing else.

Two kinds of patients count: a hospital's own (matched), where it must not lose, and those from elsewhere (global), whom
training alone serves badly. Every row that shares something is judged. It is worth it if no hospital is harmed beyond
chance and either

- own patients gain on average, by at least what the page can show; or
- own patients do not lose on average, and patients from elsewhere gain at least a point.

Else it is not, or not for everyone, and the page says so. It goes by one metric, chosen for the run or the page; the
others stand beside it, in the headline where they say the opposite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbicross.report.metric import NAMES
from fedbicross.report.summary import LEVEL, Alone, Summary, seeds_of, training_alone
from fedbicross.report.text import PROTOCOLS, count, percent, percent_sd, points, short

UPPER_BOUND = "upper bound: pools the data, not federated"
CLEAR = 0.01  # a gain for patients from elsewhere counts from one point on


@dataclass(frozen=True)
class Verdict:
    """``kind`` is good, mixed, bad or unknown; ``sentences`` follow the headline, ``cautions`` are smaller.

    ``beside`` is what the metrics say that the verdict does not go by; it is one of the sentences.
    """

    kind: str
    badge: str
    headline: str
    sentences: tuple[str, ...]
    cautions: tuple[str, ...]
    best: Summary | None
    beside: tuple[str, ...] = ()


# --- one row ---------------------------------------------------------------------------------------------


def harm_words(item: Summary, noun: str = "client", seeds: bool = True) -> str | None:
    """``harms 3 of 5 clients``, ``0 of 5 clients harmed, 1 lower by chance``, or None where it was not measured."""
    if item.harmed is None or item.lower is None or item.is_local:
        return None
    over = f" ({item.seeds} seeds)" if seeds and item.seeds > 1 else ""
    everyone = f"{item.judged} {noun}{'' if item.judged == 1 else 's'}"
    by_chance = item.lower - item.harmed
    if not item.lower:
        return f"no {noun} harmed{over}"
    if not item.harmed:
        return f"0 of {everyone} harmed, {by_chance} lower by chance{over}"
    more = f", {by_chance} more lower by chance" if by_chance else ""
    if item.clearly_harmed is None:
        more = " (lower at all)"
    return f"harms {item.harmed} of {everyone}{more}{over}"


def row_verdict(item: Summary) -> list[str]:
    """What the table says about a method, in words: losing to training alone is never left to colour."""
    if item.is_reference:
        some = f", in {len(item.reference_rows)} of {item.seeds} seeds"
        return [f"the reference: training alone{some if len(item.reference_rows) < item.seeds else ''}"]
    words = [UPPER_BOUND] if item.role == "upper_bound" else []
    if item.is_local:
        return ["training alone, another way", *([] if item.gain.mean is None else [_beside(item)])]
    if item.loses:
        words.append(f"loses to training alone by {_plain(item.gain.mean)} points{_of(item)}")
    elif item.beats:
        words.append(f"beats training alone by {_plain(item.gain.mean)} points{_of(item)}")
    elif item.gain.mean is not None:
        words.append("level with training alone")
    harm = harm_words(item)
    if harm and item.role != "upper_bound":
        words.append(harm)
    return words or ["not compared: nobody trained alone"]


def _beside(item: Summary) -> str:
    """Another way of training alone against the reference; it is no method, and cannot lose or win."""
    if not item.loses and not item.beats:
        return "level with the reference"
    return f"{_plain(item.gain.mean)} points{_of(item)} {'below' if item.loses else 'above'} the reference"


def _of(item: Summary | Alone, before: str = " of ") -> str:
    """Which points, where they are not of accuracy."""
    return "" if item.metric == "accuracy" else f"{before}{NAMES[item.metric]}"


def _plain(fraction: float | None) -> str:
    """Points without a sign."""
    return points(abs(fraction or 0.0)).lstrip("+")


def gain_elsewhere(item: Summary) -> tuple[float, str]:
    """The gain for patients from elsewhere, and who they are: all (global) or, if that is level, known classes only."""
    everyone, known = (item.gain_elsewhere[protocol].mean for protocol in ("global", "label_set"))
    if (known or 0.0) >= CLEAR > abs(everyone or 0.0):
        return known or 0.0, "for patients from elsewhere of the classes it knows"
    return everyone or 0.0, "for patients from elsewhere"


# --- all rows --------------------------------------------------------------------------------------------


def judge(results: Mapping[str, Any], summaries: list[Summary]) -> Verdict:
    """The verdict for a whole run."""
    alone = training_alone(summaries)
    candidates = [item for item in summaries if item.shares]
    compared = [item for item in candidates if item.gain.mean is not None]
    if not compared or alone is None:
        return _unknown(alone, candidates)
    best = min(
        compared, key=lambda item: (_rank(item), -(item.gain.mean or 0.0), -gain_elsewhere(item)[0], -_others(item))
    )
    kind, badge, headline = _headline(best, compared)
    if _nothing_learned(summaries):
        by_others = _by_others(compared)  # answers may be no use yet where images are ranked well already
        kind, badge = ("mixed", "Train longer") if by_others else ("bad", "Nothing learned")
        learned = f"In {NAMES[best.metric]} no model" if by_others else "No model"
        words = "learned more than the most frequent class of each hospital: train longer before judging"
        headline = f"{learned} {words}{by_others}."
    badge = badge if results.get("complete") is True else f"So far: {badge[0].lower()}{badge[1:]}"
    beside = tuple(_beside_it(alone, best))
    sentences = (_alone(alone, compared), *beside, *_harms(compared), *_patients_elsewhere(alone, compared))
    return Verdict(kind, badge, headline, sentences, _cautions(results, best, compared), best, beside)


def _rank(item: Summary) -> tuple[int, float]:
    """The better, the lower: worth it for own patients, for others, gains that harm somebody, no gain, a loss."""
    if item.harmed == 0 and item.beats and not _often_behind(item):
        return 0, 0.0
    if item.harmed == 0 and not item.loses and gain_elsewhere(item)[0] >= CLEAR:
        return 1, 0.0
    if item.beats:
        return 2, _harm_rate(item)
    return (3, _harm_rate(item)) if not item.loses else (4, 0.0)


def _others(item: Summary) -> float:
    """The largest gain by a metric that the verdict does not go by, where all else is equal."""
    return max(gain.mean or 0.0 for gain in item.gain_beside.values())


def _often_behind(item: Summary) -> bool:
    """Whether training alone is ahead in half of the seeds or more, so that one seed alone makes the average."""
    return 2 * sum(gain <= -LEVEL for gain in item.gains if gain is not None) >= item.gain.count


def _harm_rate(item: Summary) -> float:
    return 1.0 if item.harmed is None else item.harmed / max(item.judged, 1)


def _headline(best: Summary, compared: Sequence[Summary]) -> tuple[str, str, str]:
    """Kind, badge and one sentence: what was gained, for whom."""
    name, harm, (rank, _) = short(best.method), harm_words(best, "hospital"), _rank(best)
    others, who = gain_elsewhere(best)
    gains = f"{name} gains {_plain(best.gain.mean)} points{_of(best)} for a hospital’s own patients"
    gains += f" and {_plain(others)} {who}" if others >= CLEAR else ""
    by_chance = f" ({best.lower} of {best.judged} lower by chance)" if best.lower else ""
    though = _though(best)
    if rank == 0:
        but = f", but loses {_plain(others)} points {who}" if others <= -CLEAR else ""
        return "good", "Worth it", f"Taking part was worth it: {gains}, and harms no hospital{by_chance}{but}{though}."
    if rank == 1:
        words = f"{name} costs nobody anything at home{by_chance}, and gains {_plain(others)} points{_of(best)} {who}"
        return "good", "Worth it", f"Taking part was worth it: {words}{though}."
    if rank == 2 and best.harmed is None:
        return "mixed", "Gain, harm unknown", f"On average {gains}; whom it harms was not measured{though}."
    if rank == 2 and best.harmed:
        return "mixed", "Mixed", f"Taking part paid on average, not for everyone: {gains}, but {harm}{though}."
    if rank == 2:
        ahead = sum(value > 0 for value in best.gains if value is not None)
        return "mixed", "Mixed", f"Taking part paid in {ahead} of {best.gain.count} seeds: on average {gains}{though}."
    by_others = _by_others(compared)
    taking_part = f"In {NAMES[best.metric]} taking part" if by_others else "Taking part"
    if rank == 3:
        words = f"{taking_part} brought nothing: the best method, {name}, is level with training alone"
        if best.harmed:
            return "bad", "Not worth it", f"{words} and {harm}{by_others}."
        return "mixed", "Mixed" if by_others else "No gain", f"{words}{by_others}."
    words = f"{taking_part} was not worth it: no method beats training alone on a hospital’s own patients"
    return "bad", "Not worth it", f"{words}{_at_a_price(compared)}{by_others}."


def _though(best: Summary) -> str:
    """Where another metric says that own patients lose what this one says they gain."""
    lost = [(name, gain.mean or 0.0) for name, gain in best.gain_beside.items() if (gain.mean or 0.0) <= -CLEAR]
    words = " and ".join(f"{_plain(gain)} points of {NAMES[name]}" for name, gain in lost)
    return f", though it loses {words}" if words else ""


def _by_others(compared: Sequence[Summary]) -> str:
    """Who gains for own patients by another metric, where nobody does by this one; the largest gain is named."""
    gains = [(gain.mean or 0.0, name, item) for item in compared for name, gain in item.gain_beside.items()]
    gain, name, best = max(gains, key=lambda entry: entry[0])
    if gain < CLEAR:
        return ""
    reached = percent(best.scores[name]["matched"].mean)
    return f"; but in {NAMES[name]} {short(best.method)} gains {_plain(gain)} points (to {reached}\u00a0%)"


def _at_a_price(compared: Sequence[Summary]) -> str:
    """Who gains elsewhere what it loses at home, where every method loses at home."""
    best = max(compared, key=lambda item: gain_elsewhere(item)[0])
    gain, who = gain_elsewhere(best)
    if gain < CLEAR:
        return ""
    won = f"{_plain(gain)} points{_of(best)} {who}"
    return f"; {short(best.method)} gains {won} and loses {_plain(best.gain.mean)} at home"


def _nothing_learned(summaries: Sequence[Summary]) -> bool:
    """Whether no row is clearly better than always naming a client's most frequent class."""
    floor = next((item for item in summaries if item.method == "majority"), None)
    others = [item for item in summaries if item is not floor]
    return floor is not None and bool(others) and not any(_learned(item, floor) for item in others)


def _learned(item: Summary, floor: Summary) -> bool:
    """Better for own patients, or for any patients in balanced accuracy, where one constant answer is like another.

    In accuracy a network that always gives the same answer can be lucky with patients from elsewhere.
    """
    balanced = "balanced_accuracy" if floor.scores["balanced_accuracy"]["global"].count else "accuracy"
    places = [("accuracy", "matched"), (item.metric, "matched"), *((balanced, protocol) for protocol in PROTOCOLS)]
    return any(
        (item.scores[name][protocol].mean or 0.0) >= (floor.scores[name][protocol].mean or 0.0) + CLEAR
        for name, protocol in places
    )


def _alone(alone: Alone, compared: Sequence[Summary]) -> str:
    reach = percent_sd(alone.score["matched"])
    names = " or ".join(short(name) for name in alone.methods)
    how = f" (the best of {alone.ways} ways: {names})" if alone.ways > 1 else ""
    winners = sum(item.beats for item in compared)
    beaten = {0: "none beats it", 1: "1 beats it"}.get(winners, f"{winners} beat it")
    return (
        f"Under the matched protocol – each hospital’s own patient mix – training alone{how} reaches "
        f"{reach}\u00a0%{_of(alone, ' ')}. Of {count(len(compared), 'method')}, {beaten} on average."
    )


def _beside_it(alone: Alone, best: Summary) -> list[str]:
    """The metrics that the verdict does not go by, for the hospitals' own patients."""
    found = []
    for name in best.gain_beside:
        mine, bar = (scores[name]["matched"].mean for scores in (best.scores, alone.scores))
        if mine is not None and bar is not None:
            found.append(f"{NAMES[name]} {percent(bar)}\u00a0% alone, {percent(mine)}\u00a0% with {short(best.method)}")
    return [f"Beside {NAMES[best.metric]}, for own patients: {'; '.join(found)}."] if found else []


def _harms(compared: Sequence[Summary]) -> list[str]:
    """Who pays, worst first; a long list is cut, since the table below has all of them."""
    harmful = sorted((item for item in compared if item.harmed), key=lambda item: -_harm_rate(item))
    if not harmful:
        beyond = " beyond chance" if any(item.lower for item in compared) else ""
        return [f"No method harmed any hospital{beyond}."] if all(item.harmed == 0 for item in compared) else []
    parts = [f"{short(item.method)} {harm_words(item, 'hospital', seeds=False)}" for item in harmful[:4]]
    more = f"; {len(harmful) - 4} more also harm some" if len(harmful) > 4 else ""
    seeds = max(item.seeds for item in harmful)
    return ["; ".join(parts) + more + (f" (hospitals counted over {seeds} seeds)." if seeds > 1 else ".")]


def _patients_elsewhere(alone: Alone, compared: Sequence[Summary]) -> list[str]:
    """The other side of the bargain: patients unlike the hospital's own."""
    own = alone.score["global"].mean
    others = [item for item in compared if item.score["global"].mean is not None]
    if own is None or not others:
        return []
    best = max(others, key=lambda item: item.score["global"].mean or 0)
    there = best.score["global"].mean or 0
    mine, theirs = f"training alone reaches {percent(own)}\u00a0%", f"{percent(there)}\u00a0%"
    lead = (
        f"{mine}, {short(best.method)} {theirs}"
        if there >= own
        else f"{mine}, the best of the others ({short(best.method)}) {theirs}"
    )
    return [f"For patients from everywhere (global protocol) {lead}."]


def _cautions(results: Mapping[str, Any], best: Summary, compared: Sequence[Summary]) -> tuple[str, ...]:
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
    if any(item.lower is not None and item.clearly_harmed is None for item in compared):
        notes.append("These results do not tell harm from chance: every client that is lower at all counts as harmed.")
    total = len(seeds_of(results))
    behind = [short(item.method) for item in compared if item.seeds < total]
    if behind:
        notes.append(
            f"Not all seeds are finished for {', '.join(behind[:4])}{' and others' if len(behind) > 4 else ''}."
        )
    return tuple(notes)


def _unknown(alone: Alone | None, candidates: Sequence[Summary]) -> Verdict:
    if alone is None:
        headline = "Whether taking part was worth it cannot be said: this run has no local_only row to compare with."
        advice = "Add local_only (on a frozen encoder local_head): it is what a hospital has without taking part."
    elif not candidates:
        headline = "Nothing to judge yet: in this run nobody shares anything."
        advice = f"Training alone reaches {percent_sd(alone.score['matched'])}\u00a0% under the matched protocol."
    else:
        headline = "Whether taking part was worth it cannot be said: no method shares a matched result with it."
        advice = "The matched protocol needs test images in the classes that the clients train on."
    return Verdict("unknown", "Cannot be judged", headline, (advice,), (), None)
