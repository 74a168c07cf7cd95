"""The process of one SLURM task: `python -m redline.cli.rank train …`, as the script of `redline launch` starts it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from redline.errors import EXIT_DONE, EXIT_PREEMPTED

# ----------------------------------------------------------------------------------------------------
# SLURM's tasks as torchrun's ranks.


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, from what srun sets; nothing where there is one task, which needs no others."""
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
    """srun ends the other ranks when one leaves with an error, and "preempted" is none: rank 0, which commits the
    checkpoint and leaves last, says it for all. Else the first to leave would cut short a save of rank 0."""
    others = environment.get("RANK", "0") != "0"
    return EXIT_DONE if code == EXIT_PREEMPTED and others else code


def main() -> None:
    """Set the variables torchrun would set, run the command line, and end with the exit code srun should see."""
    os.environ.update(rank_variables(os.environ))
    from redline.cli.main import exit_process, run

    exit_process(exit_code(run(), os.environ))


if __name__ == "__main__":
    main()
