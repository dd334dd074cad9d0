"""What agents report, told to the dispatcher: latencies, transfers, slowness, sessions."""
