"""What internal messages may say: checked before a handler sees one.

* `vocabulary` - reads the rules that stand beside the fields in the .proto files.
* `relations` - what one field says about another, by message; rules of one field cannot.
* `checking` - one checker per type of message, compiled once: `check(message)`.
* `interceptor` - checks the requests of unary calls.
* `offences` - counts who sends what cannot be, and says for how long nobody should listen.

docs/message-rules.md says how a rule is written, docs/adr/0017 why there are rules.
"""

from services.rules.checking import check, checker_of, parsed
from services.rules.vocabulary import Bounds, bounds_of

__all__ = ["Bounds", "bounds_of", "check", "checker_of", "parsed"]
