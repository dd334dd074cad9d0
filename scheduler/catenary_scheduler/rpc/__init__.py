"""The streams of agents and gateways: reports come in and are checked, commands and news go out."""
