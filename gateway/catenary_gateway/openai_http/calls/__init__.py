"""The steps that all paths have in common which take a prompt or texts.

prompt_calls    from the headers to the session or the data plane
bodies          bodies as types, and what is refused of them
event_streams   answers as server-sent events
"""
