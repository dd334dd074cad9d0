"""Planning in the running scheduler: when to plan anew, and the making of one plan.

Plans that take long are made in a process of their own, beside the event loop.
"""
