"""What one task of a SLURM job runs: `python -m redline.cli.rank train …`, as the script of `redline launch` does."""

from __future__ import annotations

import os
import sys

from redline.launch.ranks import exit_code, rank_variables


def main() -> None:
    os.environ.update(rank_variables(os.environ))
    from redline.cli.main import main as redline

    code = 0
    try:
        redline()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    sys.exit(exit_code(code, os.environ))


if __name__ == "__main__":
    main()
