"""From the rows' headers to scored micro-batches."""
