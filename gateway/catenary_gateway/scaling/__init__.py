"""What the scheduler says of scaling, to KEDA and to whoever reads metrics."""
