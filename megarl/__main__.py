"""One trainer rank: `torchrun ... -m megarl RECIPE [key=value ...] [--resume]`; `megarl train` starts them all.

Nothing else is here. Saving a checkpoint starts a process a rank that imports this file again (megatron-core 0.16 and 0.19):
with the trainer in it, that took each of them as long as the start of the run.
"""

import sys

if __name__ == "__main__":
    from megarl.cluster.preemption import ASKED

    ASKED.watch()  # before the imports, which take seconds
    from megarl.telemetry.output import endure_output

    endure_output()
    try:
        from megarl.build import main

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # the agent stops a rank whose peer has failed: its traceback would bury the peer's
        sys.exit(130)
