"""From logits to log-probs and entropies, row by row, on the CPU and in kernels."""
