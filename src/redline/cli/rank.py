"""The process of one SLURM task: `python -m redline.cli.rank train …`, as the script of `redline launch` starts it."""

from __future__ import annotations

import os

from redline.launch.ranks import exit_code, rank_variables


def main() -> None:
    """Set the variables torchrun would set, run the command line, and end with the exit code srun should see."""
    os.environ.update(rank_variables(os.environ))
    from redline.cli.main import exit_process, run

    exit_process(exit_code(run(), os.environ))


if __name__ == "__main__":
    main()
