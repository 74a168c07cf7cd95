"""Run the command line as one SLURM task: `python -m redline.cli.rank train …`, as `redline launch` writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from redline.errors import EXIT_DONE, EXIT_PREEMPTED


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set, from those of srun; none for a job of one task."""
    world = int(environment.get("SLURM_NTASKS", "1"))
    if world == 1:
        return {}
    nodes = int(environment.get("SLURM_NNODES", "1"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(world // nodes),
        "GROUP_RANK": environment["SLURM_NODEID"],
    }


def exit_code(code: int, environment: Mapping[str, str]) -> int:
    """Return the exit code for srun: ranks other than 0 report a preempted run as done.

    srun kills the remaining ranks as soon as one exits with an error. Rank 0 commits the checkpoint and exits last, so
    it alone reports the preemption; otherwise the first rank to exit would cut its save short.
    """
    is_rank_0 = environment.get("RANK", "0") == "0"
    return EXIT_DONE if code == EXIT_PREEMPTED and not is_rank_0 else code


def main() -> None:
    """Set the variables torchrun would set, run the command line, and end with the exit code srun should see."""
    os.environ.update(rank_variables(os.environ))
    from redline.cli.main import exit_process, run

    exit_process(exit_code(run(), os.environ))


if __name__ == "__main__":
    main()
