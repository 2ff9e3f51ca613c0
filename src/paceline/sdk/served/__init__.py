"""Serves rewards and environments over gRPC."""
