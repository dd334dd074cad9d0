"""A gateway of a cluster with several scheduler groups: one link to each, one face to the planes.

* `rotation` - whose turn it is: weighted round robin.
* `tables` - what all groups together serve, and where frames reach their agents.
* `router` - which group has which request, and what becomes of it when that one has no room.
* `listener` - what one group's scheduler says, made into what one scheduler would say.
* `admin` - the Admin service over all groups.
* `sums` - statuses, plans and advice of several groups as one.
"""
