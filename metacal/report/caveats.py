"""What a reader of a comparison must know: how it was tested, and what beside the method differs between its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metacal.runs.record import Group, Run
from metacal.runs.settings import show_value

__all__ = ["fitted_val", "test_note", "unequal_conditions", "unequal_data", "unequal_times", "unread_lines"]

_NAMED = 3  # groups that are named with a value, before "and 9 more"


def test_note(groups: Sequence[Group], alpha: float, resamples: int, moderated: bool, fitted: str) -> str:
    """The test behind the marks, in full; `fitted`: what each run has that was fitted on val, if anything."""
    m = len(groups) - 1
    comparisons = f"{m} comparison{'s' * (m > 1)}"
    text = (
        "Bold (in plain text *) is the best of a column, before and after scaling apart, and with it every row whose "
        f"difference from it may be chance: p of {alpha * 100:g} % or more, two-sided, after Holm's adjustment for "
        f"{comparisons}. "
    )
    single = [g for g in groups if len(g.runs) == 1]
    if len(single) < len(groups):
        text += (
            "The difference is that of the means over seeds, of runs with the same seed where there are such. Chance "
            "is how it varies from seed to seed, and with the images that happen to be in the test split "
            f"({resamples} resamples, the same for all runs)."
        )
        if moderated:
            text += (
                " How much a method varies over seeds is moderated, drawn from what its own few runs say towards what "
                "the others' say: a method whose seeds scatter far more than the others' is judged a little too boldly."
            )
    else:
        text += f"Chance is which images happen to be in the test split ({resamples} resamples, the same for all runs)."
    if single:
        who = "All methods" if len(single) == len(groups) else ", ".join(g.short for g in single)
        have = "have" if len(single) > 1 else "has"
        text += f" {who} {have} one run: comparisons with it speak of these runs only, not of what another seed gives."
    own_splits = all(run.config.get("data.split_seed", 0) is None for g in groups for run in g.runs)
    text += " It takes as given " + ("the test images' source" if own_splits else "the one split of the images")
    return text + (f" and each run's one fitted {fitted}." if fitted else ".")


def unequal_conditions(groups: Sequence[Group]) -> list[str]:
    """Of training: epochs, model, optimizer, augmentation, and the number of labelled images, with who has what."""

    def model(g: Group) -> str:
        options = [f"{k.split('.', 1)[1]}={show_value(v)}" for k, v in g.differs.items() if k.startswith("model.")]
        return " ".join([str(g.config.get("model.name")), *(word for word in options if not word.startswith("name="))])

    def value(key: str) -> Callable[[Group], Any]:
        return lambda g: g.config.get(key)

    told = {key for g in groups for key in g.differs}
    out = [
        _unequal("epochs", groups, value("epochs")),
        _unequal("selection of the epoch (select)", groups, value("select")),
        _unequal("patience", groups, value("patience")),
        _unequal("model", groups, model),
        _unequal("optimizer", groups, value("optimizer.name")),
        _unequal("augmentation (data.crop_padding)", groups, value("data.crop_padding")),
        _unequal("augmentation (data.flip)", groups, value("data.flip")),
    ]
    if "data.mixup" in told:  # elsewhere it is a method's own
        out.append(_unequal("augmentation (data.mixup)", groups, value("data.mixup")))
    out.append(_unequal("number of labelled training images", groups, _labelled))
    return [line for line in out if line]


def unequal_data(groups: Sequence[Group]) -> list[str]:
    """Seeds, splits, and training or val images that differ under one configuration of the data."""
    out = []
    if len({g.seeds for g in groups}) > 1 and any(len(g.runs) > 1 for g in groups):
        out.append("Not all methods have the same seeds: where they differ, seeds are taken as independent.")
    runs = [run for g in groups for run in g.runs]
    if len({run.config.get("data.split_seed") for run in runs}) > 1:
        out.append("Not the same splits of training and val (data.split_seed): test is the same.")
    for splits, what in ((("train", "meta"), "training"), (("val",), "val")):
        sets: dict[str, dict[str, Run]] = {}
        for run in runs:
            prints = run.fingerprints
            if prints:
                images = json.dumps([prints.get(split) for split in splits])
                sets.setdefault(_data_key(run), {}).setdefault(images, run)
        for different in sets.values():
            if len(different) > 1:
                named = ", ".join(str(run.path) for run in different.values())
                out.append(f"Not the same {what} images under one configuration of the data: {named}.")
    return out


def fitted_val(groups: Sequence[Group]) -> list[str]:
    """Groups whose val images were also their meta images, for a comparison on val."""
    fitted = [g.short for g in groups if any(run.summary.get("val_is_fitted") for run in g.runs)]
    return [f"Val is fitted, not held out, for {', '.join(fitted)}: its images were meta images too."] if fitted else []


def unequal_times(groups: Sequence[Group]) -> list[str]:
    """Devices, threads, monitors and versions, on which times depend."""
    runs = [run for g in groups for run in g.runs]
    conditions = {"device": sorted({str(run.summary.get("device")) for run in runs})}
    for key in sorted({key for run in runs for key in run.watching}):
        # Bins and resamples are counted outside the steps.
        if key == "threads" or (key.startswith("monitor.") and key not in ("monitor.n_bins", "monitor.resamples")):
            conditions[key] = sorted({show_value(run.watching.get(key)) for run in runs})
    conditions["monitor.val_every"] = sorted({show_value(run.config.get("monitor.val_every")) for run in runs})
    differ = [f"{key} ({', '.join(values)})" for key, values in conditions.items() if len(values) > 1]
    out = [f"Times and step costs were not taken alike: different {', '.join(differ)}."] if differ else []
    if len({run.versions for run in runs}) > 1:
        out.append("The runs were made by different versions, listed with them.")
    return out


def unread_lines(groups: Sequence[Group]) -> list[str]:
    """Lines of metrics.jsonl that are damaged: curves and step costs lack them."""
    damaged = [(run, run.path / "metrics.jsonl") for g in groups for run in g.runs if run.unread or run.changed]
    told = [
        f"{file}, which is not as the run wrote it (its digest differs)."
        if run.changed
        else f"line {', '.join(map(str, run.unread))} of {file}, which cannot be read."
        for run, file in damaged
    ]
    return [f"Left out of curves and step costs: {what}" for what in told]


def _unequal(what: str, groups: Sequence[Group], value: Callable[[Group], Any]) -> str:
    """`Not the same epochs: 5 (cross_entropy); 200 (gamma_net).`; empty if there is one value."""
    who: dict[str, list[str]] = {}
    for g in groups:
        who.setdefault(show_value(value(g)), []).append(g.short)
    if len(who) < 2:
        return ""

    def some(names: list[str]) -> str:
        more = len(names) - _NAMED
        return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")

    return f"Not the same {what}: " + "; ".join(f"{text} ({some(names)})" for text, names in who.items()) + "."


def _labelled(g: Group) -> str:
    """Numbers of training and meta images together, of the runs of a group."""

    def count(data: Mapping[str, Any]) -> int:
        return (data.get("train") or 0) + (data.get("meta") or 0)

    return ", ".join(map(str, sorted({count(run.summary["data"]) for run in g.runs})))


def _data_key(run: Run) -> str:
    """Runs with one key should have had the same images: its settings of the data, and whether it has a meta split."""
    settings = {k: v for k, v in run.config.items() if k.startswith("data.") and k not in _NOT_OF_IMAGES}
    seed = run.seed if run.config.get("data.split_seed", 0) is None else None
    return json.dumps([settings, seed, bool(run.summary["data"].get("meta"))], sort_keys=True, default=str)


# The meta images are among those that are trained on, or else the summary tells how many were set aside.
_NOT_OF_IMAGES = {
    f"data.{key}"
    for key in (
        *("batch_size", "meta_batch_size", "meta_from", "meta_folds", "meta_augment"),
        *("crop_padding", "flip", "mixup", "normalize", "mean", "std"),
    )
}
