"""`python -m megarl.megatron.export_command RUN_DIR OUT [--adapter]`: what `megarl export` starts as a process."""

from __future__ import annotations

import sys

from megarl.megatron.adapter_export import export_adapter
from megarl.megatron.export import export


def main(run_dir: str, target: str, *options: str) -> int:
    """Exit status 2 for what the caller can mend."""
    adapter = "--adapter" in options
    try:
        checkpoint = (export_adapter if adapter else export)(run_dir, target)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {'the adapters of ' if adapter else ''}{checkpoint.name} of {run_dir} to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
