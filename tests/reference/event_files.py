"""TensorBoard's event files as they lie on the disk, without what its server leaves out."""

from __future__ import annotations

from pathlib import Path


def logged_events(run: Path) -> dict[str, list[tuple]]:
    """Tag -> (step, value) for all events in order: scalars, histograms, images, text, layouts.

    Times differ from run to run, and so do the HParams tab's start and end, and the folder in the texts: of these only
    the tags are given.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, list[tuple]] = {}
    for file in sorted(run.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag.startswith("time/"):
                    continue
                varies = value.tag.startswith("_hparams_") or value.tag.endswith("/text_summary")
                content = value.tag if varies else value.SerializeToString()
                found.setdefault(value.tag, []).append((event.step, content))
    return found
