"""One trainer rank: `torchrun ... -m megarl RECIPE [key=value ...] [--resume]`; `megarl train` starts them all.

Keep this file small: saving a checkpoint starts a process on each rank that imports it again (megatron-core 0.16 and 0.19).
"""

import os
import sys

if __name__ == "__main__":
    from megarl.cluster.preemption import ASKED

    ASKED.watch()  # before the imports, which take seconds
    from megarl.cluster.job_environment import adapt_environment
    from megarl.telemetry.disk import endure_output

    endure_output()
    adapt_environment(os.environ, is_one_node=False)  # torchrun may have started this rank, without megarl train
    try:
        from megarl.build import main

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # a peer has failed; a traceback here would bury the peer's
        sys.exit(130)
