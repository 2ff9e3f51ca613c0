"""Converts domain types to the protobuf messages of calls between services and clients, and back."""
