"""From a batch's headers to packed micro-batches."""
