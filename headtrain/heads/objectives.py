"""Objectives: pure functions of draft logits and the teacher's, one number per row, with gradients in closed form.

M rows (trained pairs), D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_ce(draft_MD: Tensor, teacher_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the teacher renormalised over the draft vocabulary.

    Returns (loss float32 [M], gradient of the summed loss with respect to the draft logits, float32 [M, D]).
    """
    log_q = torch.log_softmax(draft_MD.float(), -1)
    p = torch.softmax(teacher_MD.float(), -1)
    loss = -torch.linalg.vecdot(p, log_q)
    return loss, log_q.exp_().sub_(p)


OBJECTIVES = {"soft_ce": soft_ce}
