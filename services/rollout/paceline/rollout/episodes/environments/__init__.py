"""Speaks with environments: served over gRPC, or attached to this server."""
