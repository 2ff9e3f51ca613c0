"""Shared parts of all services: the member bootstrap, gRPC servers and channels, the runtime, telemetry."""
