"""`python -m megarl.agent`. Signals wait from here on, until there is somebody to take them: the imports take seconds."""

import os
import sys

if __name__ == "__main__":
    from megarl.preemption import hold_signals

    hold_signals()
    from megarl.job_environment import adapt_environment
    from megarl.output import endure_output

    endure_output()
    adapt_environment(os.environ)
    from megarl.agent.command import main

    sys.exit(main(sys.argv[1:]))
