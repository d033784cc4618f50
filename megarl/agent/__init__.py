"""torchrun in this process, with the exit status of the ranks and with signals that let them save.

    python -m megarl.agent TORCHRUN_OPTIONS -m megarl.train RECIPE [key=value ...] [--resume | --resume-if-saved]

Every option of torchrun holds, on several nodes with a fixed master (`--master-addr`) alone. What differs (torch 2.13 ends
the ranks 30 s after a signal, stops all others as soon as the first one ends with another status than 0, and says 1 for
everything):

- SIGTERM and SIGUSR1 go on to the rank processes, and to them alone: Ray's processes, in the same process group, are needed
  until the ranks have saved. The ranks have `run.grace_s` to leave; then they are killed.
- A rank that ends with REQUEUE or BAD_INPUT stops nobody: the others are about to do the same. Neither is restarted.
- Ranks that the watchdog has ended (`megarl/watchdog/`) are not restarted: the status is HUNG.
- The exit status is that of the ranks (`megarl/exit_status.py`), and a sentence says which of them ended how.
- With `--max-restarts` on several nodes, a rank that dies on one restarts those of all at once, and as often on each:
  torch's agents with a fixed master do not speak to each other, and would wait for every rank's deadline (`nodes.py`).
"""
