"""What every service shares: gRPC servers and channels, the link to the controller, the runtime, telemetry."""
