"""What a recipe says about ranks that do not go on."""

from __future__ import annotations

from megarl.recipe.sections import Seconds, Section

# Below trainer.collective_timeout_s: the end of a collective names nobody.
FIRST_STEP_SHARE, STEP_SHARE = 0.8, 0.5


class WatchdogSection(Section):
    first_step_s: Seconds | None = None
    """How long a rank may stand in one phase or span before the end of its first step, which compiles and allocates; below
    `trainer.collective_timeout_s`. null: 0.8 of that."""
    step_s: Seconds | None = None
    """The same in all later steps. null: half of `trainer.collective_timeout_s`, or `first_step_s` where that is less."""
    files_s: Seconds = 1800.0
    """The same in phases that read or write files of the model: `start`, `load_checkpoint` and `checkpoint`."""
    stacks_s: Seconds = 5.0
    """How long the processes of a run that hangs may take to write their stacks before they are ended."""
