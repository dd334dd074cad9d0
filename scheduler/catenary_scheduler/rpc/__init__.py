"""The streams of agents and gateways: reports in and checked, commands out."""
