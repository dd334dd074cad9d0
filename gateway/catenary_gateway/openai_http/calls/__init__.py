"""What all paths that take a prompt or texts have in common.

prompt_calls    from the headers to the session or the data plane
bodies          bodies as types, and what is refused of them
event_streams   answers as server-sent events
"""
