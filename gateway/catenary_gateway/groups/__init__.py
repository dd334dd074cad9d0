"""Links to several scheduler groups, which look like one scheduler to a gateway's planes.

* `rotation` - the choice of the next group: weighted round robin.
* `tables` - the models that all groups together serve, and the addresses of their agents.
* `router` - the group of each request, and another one if that group has no room.
* `listener` - the messages of one group's scheduler, changed to those of a single scheduler.
* `admin` - the Admin service over all groups.
* `sums` - statuses, plans and advice of several groups as one.
"""
