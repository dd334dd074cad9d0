"""`make demo`: its models, its photographs and its chat."""
