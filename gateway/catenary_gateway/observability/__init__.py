"""What remains of a request after its answer: metrics, times, outcomes."""
