"""What internal messages may say: checked before a handler sees one.

* `vocabulary` - reads the rules that stand beside the fields in the .proto files.
* `relations` - what one field says about another, by message; rules of one field cannot.
* `walking` - looks at the bytes of a message, compiled; nearly all there is to do for a good one.
* `compiling` - looks at a message: where nothing is compiled, and at what `walking` doubts.
* `checking` - both, one checker per type of message: `parsed(kind, data)`.
* `reading` - the same for what gRPC reads: streams, and requests of unary calls.
* `sizing` - counts the values in a message before it is made.
* `offences` - counts who sends what cannot be, and says for how long nobody should listen.

docs/message-rules.md says how a rule is written, docs/adr/0017 why there are rules.
"""

from catenary_services.rules.checking import check, checker_of, parsed
from catenary_services.rules.vocabulary import FieldBounds, bounds_of

__all__ = ["FieldBounds", "bounds_of", "check", "checker_of", "parsed"]
