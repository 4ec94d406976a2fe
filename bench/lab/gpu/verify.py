"""Cost of verifying drafts: the time of a step with k draft tokens over a step without any."""

from __future__ import annotations

from functools import partial

from ...common.report import Spread
from .bed import PAGE_SIZE, Bed
from .stage import QWEN, SMALL, Stage

DEPTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8)
TURNS = 3
BUSY = (0, 4)  # Numbers of draft tokens at which the device's own share is measured, too.


def run(stage: Stage) -> None:
    """Measure at two contexts and three batch sizes; the 8B shape first."""
    stage.try_each({name: partial(_model, stage, name) for name in stage.few(QWEN, SMALL)})


def _model(stage: Stage, name: str) -> None:
    contexts, batches = ((64,), (1, 2)) if stage.rehearses else ((512, 8192), (1, 8, 32))
    decoder = stage.place.decoder(stage.place.shape(name))
    bed = Bed.make(decoder, max(batches), max(contexts) + 2 * PAGE_SIZE)
    for context in contexts:
        for batch in batches:
            with stage.part(f"{name}, {batch} x {context}"):
                _point(stage, bed, name, context, batch)


def _point(stage: Stage, bed: Bed, name: str, context: int, batch: int) -> None:
    depths = (0, 4) if stage.rehearses else DEPTHS
    plans = {k: bed.plan(batch, context, num_drafts=k) for k in depths}
    found: dict[int, list[float]] = {k: [] for k in depths}
    # The depths take turns, so that a slow spell of the machine affects all of them.
    for _ in range(TURNS):
        for k, plan in plans.items():
            found[k].append(bed.seconds(plan, repeats=3 if stage.rehearses else 8).median)
    row: dict[str, object] = {
        "model": name,
        "context": context,
        "batch": batch,
        "ms without drafts": Spread.of(found[0]).scaled(1e3),
    }
    for k in depths[1:]:
        row[f"k={k}"] = Spread.of([on / off for on, off in zip(found[k], found[0], strict=True)])
    busy = {k: bed.busy(stage.gauge, plans[k]) for k in BUSY}
    row["k=4, device alone"] = busy[4] / busy[0] if busy[0] else "-"
    stage.add("A step with k draft tokens over one without", row)
