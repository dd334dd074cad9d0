"""The gRPC side of the scheduler: streams, and conversion between messages and events."""
