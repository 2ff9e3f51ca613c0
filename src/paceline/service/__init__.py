"""What every service shares: the member bootstrap, gRPC servers and channels, the runtime, telemetry."""
