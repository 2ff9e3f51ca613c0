"""On-policy distillation (arXiv:2306.13649): a student learns from a teacher's log-probs of its samples."""

from paceline.algorithms.algorithm import Algorithm
from paceline.algorithms.rows import Estimates


class Distillation(Algorithm):
    """Uses log-probs of the teacher minus those of the student as advantages."""

    networks = ("teacher",)

    def advantages(self, rows):
        """Returns log p_teacher - log p_student; its mean is the negative KL(student || teacher)."""
        return Estimates(rows.log_probs["teacher"] - rows.log_probs["rollout"])
