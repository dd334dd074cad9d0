"""The joiner's side of joining: checks, certificates, and agents that are watched until it leaves.

`joining` has the steps, `joined_machine` what is kept of them, and `joined_agents` the process that
runs. The host's side is `catenaryd.enrolment`.
"""
