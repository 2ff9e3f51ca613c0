"""One thread: the tensors here are tiny, and results must not depend on how a sum was split over cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
