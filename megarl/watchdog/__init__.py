"""A run that does not go on ends by its deadline, with the stacks of all its processes and the name of the rank at fault.

Each rank writes where it stands into a page of memory, at each phase and span. On each node a process beside the ranks reads
these pages: a rank that is stopped, or that holds Python's lock for ever, cannot be relied on to say so itself. No module
here imports torch, so that this process is small.
"""
