"""The recipe: five stages, in the order in which they run.

`target` learns the text. `draft` learns the text, then the target. `copy` teaches the draft to copy
from its context, which so small a model hardly finds by itself, then goes on with text and target.
`match` goes back to the target with the text and the draft's habits in its loss: it gives up a
little of what so small a draft cannot follow. `refine` follows the target there.
"""

from dataclasses import dataclass
from typing import Literal

from .distill import Mix
from .models import Role

StageName = Literal["target", "draft", "copy", "match", "refine"]


@dataclass(frozen=True)
class Stage:
    """What sets one stage apart. `phases`: from which share of the time which losses count.

    `rate` scales both peak learning rates; `fresh` starts from new weights instead of the saved;
    until the share `repeat_until`, `repeat_rows` of every batch are patterns to be copied.
    """

    name: StageName
    role: Role
    phases: tuple[tuple[float, Mix], ...]
    fresh: bool
    rate: float = 1.0
    repeat_rows: int = 0
    repeat_until: float = 0.0


STAGES: dict[StageName, Stage] = {
    stage.name: stage
    for stage in (
        Stage("target", "target", ((0.0, Mix(ce=1)),), fresh=True),
        Stage("draft", "draft", ((0.0, Mix(ce=1)), (0.3, Mix(ce=0.1, kl=1))), fresh=True),
        Stage(
            "copy",
            "draft",
            ((0.0, Mix(ce=1)), (0.4, Mix(ce=0.1, kl=1)), (0.8, Mix(kl=0.3, tv=1))),
            fresh=False,
            repeat_rows=4,
            repeat_until=0.14,
        ),
        Stage("match", "target", ((0.0, Mix(ce=1, tv=4)),), fresh=False, rate=0.4),
        Stage("refine", "draft", ((0.0, Mix(kl=0.3, tv=1)),), fresh=False, rate=0.3),
    )
}
