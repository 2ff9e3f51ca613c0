"""Domain types as protobuf messages of the calls between services and clients."""
