"""The protocol's side: streams, and messages from and to what the dispatcher understands."""
