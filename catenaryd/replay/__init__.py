"""`catenaryd replay KIND FILE`: cases of scheduling decisions in, our decisions out.

A case file is `{"cases": [...]}`; what a case holds is up to its kind. To add a kind, write a
module that turns one case into one result (as `placement` does) and list it in `kinds`.
"""

from catenaryd.replay.command import replay_group

__all__ = ["replay_group"]
