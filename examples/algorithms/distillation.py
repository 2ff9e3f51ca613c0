"""On-policy distillation (arXiv:2306.13649): a student learns from a teacher's view of its own samples."""

from paceline.algorithms.algorithm import Algorithm
from paceline.algorithms.rows import Estimates


class Distillation(Algorithm):
    """A token's advantage is how much more likely the teacher finds it than the student that sampled it."""

    networks = ("teacher",)

    def advantages(self, rows):
        """Returns log teacher - log student, whose mean is minus the KL from student to teacher."""
        return Estimates(rows.log_probs["teacher"] - rows.log_probs["rollout"])
