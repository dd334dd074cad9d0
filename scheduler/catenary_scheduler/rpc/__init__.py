"""The streams of agents and gateways: reports in and checked, commands out, and news to all."""
