"""The numbers: pure functions from tensors to tensors, without configuration objects or globals."""
