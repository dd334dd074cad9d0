"""The commands `catenaryd replay KIND FILE`: recorded cases of scheduling decisions, decided again.

A case file is `{"cases": [...]}`; the form of a case depends on its kind. To add a kind, write a
module that turns one case into one result (as `placement` does) and list it in `kinds`.
"""

from catenaryd.replay.command import replay_group

__all__ = ["replay_group"]
