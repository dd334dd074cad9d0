"""Rules of internal messages, which are checked before a handler sees a message.

* `vocabulary` reads the rules that stand beside the fields in the .proto files.
* `relations` lists, by message, what one field implies for another.
* `walking` checks the bytes of a message in compiled code; that suffices for nearly all of them.
* `compiling` checks a parsed message: without compiled code, and where `walking` is in doubt.
* `checking` combines both in one checker per type of message: `parsed(kind, data)`; `checked` does
  the same for what gRPC reads.
* `sizing` counts the values in a message before the message is made.
* `offences` counts bad messages by sender, and says how long a sender is to be ignored.

docs/message-rules.md says how a rule is written, docs/adr/0017 why there are rules.
"""

from catenary_services.rules.checking import check, checker_of, parsed
from catenary_services.rules.vocabulary import FieldBounds, bounds_of

__all__ = ["FieldBounds", "bounds_of", "check", "checker_of", "parsed"]
