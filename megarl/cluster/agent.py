"""`python -m megarl.cluster.agent`. Signals wait from here on until a handler takes them: the imports take seconds."""

import os
import sys

if __name__ == "__main__":
    from megarl.cluster.preemption import hold_signals

    hold_signals()
    from megarl.cluster.job_environment import adapt_environment
    from megarl.telemetry.output import endure_output

    endure_output()
    adapt_environment(os.environ)
    from megarl.cluster.agent_command import main

    sys.exit(main(sys.argv[1:]))
