"""What a latent prefix is trained by: every term comes from one pass over the answer.

ce        −log p of the answer's tokens, its end included
first     of its first token, × clamp(first / mean of the answer, 1, 8) without a gradient, example by example
k         of its first K tokens
kd        τ²·KL(teacher ‖ student) at those K places; the teacher is the same model, reading the text itself
match     ‖student − teacher‖² / ‖teacher‖², of the last states at those places
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from redline.models.transformer import Decoder
from redline.objectives.latent_models import IGNORE


def token_losses(logits_BAV: Tensor, targets_BA: Tensor) -> Tensor:
    """−log p [B, A]; 0 where there is no target."""
    losses = F.cross_entropy(logits_BAV.flatten(0, 1), targets_BA.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view(targets_BA.shape)


def first_losses(losses_BA: Tensor, targets_BA: Tensor, clamp: float) -> Tensor:
    """[B]; each counts more where the first token is worse than the answer as a whole."""
    mean = losses_BA.sum(1) / (targets_BA != IGNORE).sum(1).clamp_min(1)
    first = losses_BA[:, 0]
    return first * (first / mean.clamp_min(1e-6)).detach().clamp(1.0, clamp)


def distances(student_BKV: Tensor, teacher_BKV: Tensor, there_BK: Tensor, tau: float) -> Tensor:
    """τ²·KL [B, K]."""
    ours, theirs = ((logits / tau).log_softmax(-1) for logits in (student_BKV, teacher_BKV))
    return tau**2 * F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1) * there_BK


def mismatches(student_BKD: Tensor, teacher_BKD: Tensor, there_BK: Tensor) -> Tensor:
    """[B, K], relative to the teacher's size."""
    ours, theirs = student_BKD.float(), teacher_BKD.float()
    return (ours - theirs).square().sum(-1) / theirs.square().sum(-1).clamp_min(1e-6) * there_BK


def answer_terms(
    decoder: Decoder,
    hidden_BAD: Tensor,
    targets_BA: Tensor,
    teacher_BKD: Tensor | None,
    *,
    k: int,
    clamp: float,
    tau: float,
    kd: bool,
    match: bool,
) -> dict[str, Tensor]:
    """Each term for each row [B], not yet divided by anything."""
    logits = decoder.logits(hidden_BAD)
    losses = token_losses(logits, targets_BA)
    found = {"ce": losses.sum(1), "first": first_losses(losses, targets_BA, clamp), "k": losses[:, :k].sum(1)}
    if teacher_BKD is not None:
        places = min(k, hidden_BAD.shape[1])
        there, teacher = targets_BA[:, :places] != IGNORE, teacher_BKD[:, :places]
        if kd:
            aim = decoder.logits(teacher.to(hidden_BAD.dtype)).detach()
            found["kd"] = distances(logits[:, :places], aim, there, tau).sum(1)
        if match:
            found["match"] = mismatches(hidden_BAD[:, :places], teacher, there).sum(1)
    return found
