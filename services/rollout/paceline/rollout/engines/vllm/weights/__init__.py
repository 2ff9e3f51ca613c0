"""Receives weights into vLLM's live model: where each part lands, and the general path through its loader."""
