"""Serves and calls gRPC: addresses, channels, servers, deadlines, errors, admission."""
