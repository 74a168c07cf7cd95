"""Handing a script to SLURM."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from redline.errors import UserError

_PATIENCE_S = 120  # a busy controller answers late


def submit(script: str, logs: Path | None = None) -> str:
    """The number of the job; where SLURM refuses, its own words."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        fix = "Go to a node that submits jobs; or leave out --submit, save the script, and sbatch it there."
        raise UserError("there is no sbatch here.", where="--submit", fix=fix)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)  # SLURM does not, and the job would end without a word
    try:
        done = subprocess.run(
            [sbatch, "--parsable"], input=script, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        fix = "Look with squeue whether it is there before you try again."
        raise UserError(f"sbatch did not answer within {_PATIENCE_S} s.", where="--submit", fix=fix) from None
    if done.returncode:
        said = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        fix = "`sinfo` lists the partitions; options and cluster.yaml say what is asked for."
        raise UserError(f"SLURM refuses: {said.rstrip('.')}.", where="sbatch", fix=fix)
    return done.stdout.strip().partition(";")[0]  # JOB;CLUSTER, where there are several
