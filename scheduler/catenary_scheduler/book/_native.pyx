# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, nonecheck=False
"""The compiled twin of `timeline`, `pool`, `probe` and `label_search`: the same, to the tie.

Timelines are two arrays of 64-bit integers; a pool keeps what it has to know of its GPUs in arrays
of its own, and them in the order in which they become free, which the timelines keep current. It
also knows bounds on the gaps of all its GPUs: while no gap is as long as a batch, which is the rule
where GPUs are scarce, a GPU starts no batch before it is free for good, and the order alone tells
which is the first. Read the pure modules for the reasons; comments here are only about what
differs. `tests/scheduler/book/test_native.py` holds the two against each other.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove

from catenary_services.errors import InternalError

cdef extern from *:
    ctypedef long long wide "__int128"

cdef int64_t NEVER = <int64_t>1 << 62
cdef int64_t SECOND = 1_000_000_000


# ---- intervals ----

cdef struct Line:
    int64_t* starts
    int64_t* ends  # in one piece of memory with the starts
    Py_ssize_t count
    Py_ssize_t room
    int64_t busy_until
    int64_t done_until
    int64_t gap  # no gap between two intervals is longer
    int64_t step_ns
    int64_t step_ratio
    int64_t chunk_ns
    int64_t chunks_until


cdef inline Py_ssize_t behind(const int64_t* values, Py_ssize_t count, int64_t moment) noexcept nogil:
    """Index of the first value greater than `moment` (bisect_right)."""
    cdef Py_ssize_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) >> 1
        if values[middle] > moment:
            high = middle
        else:
            low = middle + 1
    return low


cdef inline Py_ssize_t at_or_behind(const int64_t* values, Py_ssize_t count, int64_t moment) noexcept nogil:
    """Index of the first value not less than `moment` (bisect_left)."""
    cdef Py_ssize_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < moment:
            low = middle + 1
        else:
            high = middle
    return low


cdef int64_t longest_gap(const Line* line) noexcept nogil:
    cdef int64_t longest = 0, gap
    cdef Py_ssize_t i
    for i in range(1, line.count):
        gap = line.starts[i] - line.ends[i - 1]
        if gap > longest:
            longest = gap
    return longest


cdef inline int64_t free_from(Line* line, int64_t not_before, int64_t duration) noexcept nogil:
    """Earliest start at which the resource is free for `duration` (`earliest_on`)."""
    cdef Py_ssize_t count = line.count, at
    if count == 0 or line.ends[count - 1] <= not_before:
        return not_before
    if line.starts[0] >= not_before + duration:
        return not_before
    if line.gap < duration:
        return line.ends[count - 1]
    at = behind(line.ends, count, not_before)
    while at < count and line.starts[at] < not_before + duration:
        not_before = line.ends[at]
        at += 1
    if at == count:
        line.gap = longest_gap(line)
    return not_before


cdef inline int64_t both_free(Line* uplink, Line* downlink, int64_t moment, int64_t length) noexcept nogil:
    cdef int64_t sends
    while True:
        sends = free_from(uplink, moment, length)
        moment = free_from(downlink, sends, length)
        if moment == sends:
            return moment


cdef inline int64_t with_steps(const Line* line, int64_t ready, int64_t duration) noexcept nogil:
    """See `Timeline.with_steps`."""
    cdef int64_t more
    if ready < line.chunks_until:
        return duration + line.chunk_ns
    more = duration * line.step_ratio >> 10
    return duration + (more if more < line.step_ns else line.step_ns)


cdef inline int64_t transfer_ns(int64_t nbytes, int64_t bytes_per_second) noexcept nogil:
    cdef wide work = <wide>nbytes * SECOND
    return <int64_t>((work + bytes_per_second - 1) / bytes_per_second)


cdef class BookedInterval:
    """See `timeline.BookedInterval`."""

    cdef public object batch
    cdef public Py_ssize_t position
    cdef public tuple timelines
    cdef public int64_t start
    cdef public int64_t end
    cdef public bint begun
    cdef public bint done
    cdef public bint live
    cdef public bint persisted

    def __init__(self, batch, Py_ssize_t position, tuple timelines, int64_t start, int64_t end):
        self.batch = batch
        self.position = position
        self.timelines = timelines
        self.start = start
        self.end = end
        self.begun = False
        self.done = False
        self.live = False
        self.persisted = False

    @property
    def transfers(self):
        """True for the pair of links of a transfer, False for a device."""
        return len(self.timelines) > 1


cdef struct Watch:
    void* pool
    Py_ssize_t index


cdef class Timeline:
    """See `timeline.Timeline`.

    A decision in a large cluster finds most of its timelines in no cache, so what it needs of them
    is in few places.
    """

    cdef Line line
    cdef Watch* watches  # the same as `watchers`, which keeps the pools alive
    cdef Py_ssize_t watch_count
    cdef readonly object resource
    cdef readonly list uses
    cdef list watchers
    cdef object __weakref__

    def __cinit__(self, resource):
        self.resource = resource
        self.uses = []
        self.watchers = []
        self._grow(4)

    def __dealloc__(self):
        free(self.line.starts)
        free(self.watches)

    cdef watch(self, list watchers):
        """Sets the pools, each with an index, that are told of changes."""
        cdef Watch* watches = <Watch*>malloc(len(watchers) * sizeof(Watch) + 1)
        cdef Py_ssize_t at
        if not watches:
            raise MemoryError()
        for at in range(len(watchers)):
            watches[at].pool = <void*>watchers[at][0]
            watches[at].index = watchers[at][1]
        free(self.watches)
        self.watches = watches
        self.watch_count = len(watchers)
        self.watchers = watchers

    @property
    def starts(self):
        """Starts of the intervals, in order."""
        return [self.line.starts[i] for i in range(self.line.count)]

    @property
    def ends(self):
        """Ends of the intervals, in order."""
        return [self.line.ends[i] for i in range(self.line.count)]

    @property
    def busy_until(self):
        """End of the last interval, and never before `done_until`."""
        return self.line.busy_until

    @property
    def done_until(self):
        """Latest moment up to which the real use of this resource is known."""
        return self.line.done_until

    @property
    def step_ns(self):
        """Step of language models that a batch may wait for."""
        return self.line.step_ns

    @property
    def step_ratio(self):
        """What steps take beside a batch, in 1024ths of the time of the batch."""
        return self.line.step_ratio

    @property
    def chunk_ns(self):
        """The same as `step_ns` for batches that are ready before `chunks_until`."""
        return self.line.chunk_ns

    @property
    def chunks_until(self):
        """Moment until which prompts are computed."""
        return self.line.chunks_until

    @property
    def has_steps(self):
        """True if batches take longer here because steps are computed between them."""
        return self.line.step_ns > 0 or self.line.chunk_ns > 0

    def take_steps(self, int64_t step_ns, int64_t step_ratio, int64_t chunk_ns, int64_t chunks_until):
        """Sets what steps take beside the batches that are booked from now on."""
        cdef Line* line = &self.line
        cdef bint before = line.step_ns > 0 or line.chunk_ns > 0
        cdef bint has = step_ns > 0 or chunk_ns > 0
        cdef tuple watcher
        line.step_ns = step_ns
        line.step_ratio = step_ratio
        line.chunk_ns = chunk_ns
        line.chunks_until = chunks_until
        if has != before:
            for watcher in self.watchers:
                (<Pool>watcher[0]).sharing += 1 if has else -1

    def with_steps(self, int64_t ready, int64_t duration):
        """Returns the time to book for a batch of `duration` that is ready at a moment."""
        return with_steps(&self.line, ready, duration)

    cpdef insert(self, BookedInterval use):
        """Inserts an interval; InternalError if it overlaps another one."""
        cdef Line* line = &self.line
        cdef Py_ssize_t count = line.count, at
        cdef int64_t gap
        if count == line.room:
            self._grow(2 * line.room)
        if count == 0 or use.start >= line.ends[count - 1]:
            if count:
                gap = use.start - line.ends[count - 1]
                if gap > line.gap:
                    line.gap = gap
            else:
                line.gap = 0
            line.starts[count] = use.start
            line.ends[count] = use.end
            line.count = count + 1
            self.uses.append(use)
            self._changed()
            return
        at = behind(line.ends, count, use.start)
        if use.end > line.starts[at] or use.start >= use.end:
            raise InternalError(f"{self.resource} is booked twice at {line.starts[at]}")
        memmove(line.starts + at + 1, line.starts + at, (count - at) * sizeof(int64_t))
        memmove(line.ends + at + 1, line.ends + at, (count - at) * sizeof(int64_t))
        line.starts[at] = use.start
        line.ends[at] = use.end
        line.count = count + 1
        self.uses.insert(at, use)
        if at == 0:  # what was in front of the first interval is a gap now
            gap = line.starts[1] - use.end
            if gap > line.gap:
                line.gap = gap
        self._changed()

    cpdef remove(self, BookedInterval use):
        """Takes an interval out."""
        cdef Line* line = &self.line
        cdef Py_ssize_t count = line.count
        cdef Py_ssize_t at = at_or_behind(line.starts, count, use.start)
        cdef int64_t gap
        if at == count or self.uses[at] is not use:
            raise InternalError(f"{self.resource}: the use at {use.start} is another one")
        count -= 1
        memmove(line.starts + at, line.starts + at + 1, (count - at) * sizeof(int64_t))
        memmove(line.ends + at, line.ends + at + 1, (count - at) * sizeof(int64_t))
        line.count = count
        del self.uses[at]
        if 0 < at < count:
            gap = line.starts[at] - line.ends[at - 1]
            if gap > line.gap:
                line.gap = gap
        if count <= 1:
            line.gap = 0
        self._changed()

    cpdef resize(self, BookedInterval use, int64_t start, int64_t end):
        """Changes an interval that nothing else overlaps, before or after."""
        cdef Line* line = &self.line
        cdef Py_ssize_t at = at_or_behind(line.starts, line.count, use.start)
        line.starts[at] = start
        line.ends[at] = end
        if at > 0 and start - line.ends[at - 1] > line.gap:
            line.gap = start - line.ends[at - 1]
        if at < line.count - 1 and line.starts[at + 1] - end > line.gap:
            line.gap = line.starts[at + 1] - end
        self._changed()

    cpdef after(self, BookedInterval use):
        """Returns the first use behind `use` that can still move."""
        cdef Py_ssize_t at = at_or_behind(self.line.starts, self.line.count, use.start) + 1
        cdef BookedInterval other
        while at < self.line.count:
            other = <BookedInterval>self.uses[at]
            if not other.done:
                return other
            at += 1
        return None

    cpdef bint alone(self, BookedInterval use, int64_t start, int64_t end):
        """True if `[start, end)` touches the interval of `use` and no other."""
        cdef Line* line = &self.line
        cdef Py_ssize_t low = behind(line.ends, line.count, start)
        cdef Py_ssize_t high = at_or_behind(line.starts, line.count, end)
        return high - low == 1 and self.uses[low] is use

    cpdef before(self, BookedInterval use):
        """Returns the use next ahead of `use`, if one is that is not known to be over."""
        cdef Py_ssize_t at = at_or_behind(self.line.starts, self.line.count, use.start)
        if at == 0 or (<BookedInterval>self.uses[at - 1]).done:
            return None
        return self.uses[at - 1]

    cpdef list overlapping(self, int64_t start, int64_t end):
        """Returns the uses that share a moment with `[start, end)`."""
        cdef Line* line = &self.line
        cdef Py_ssize_t low = behind(line.ends, line.count, start)
        cdef Py_ssize_t high = at_or_behind(line.starts, line.count, end)
        return self.uses[low:high] if high > low else []

    cpdef ran_until(self, int64_t end):
        """Notes that this resource was really in use until `end`."""
        cdef Line* line = &self.line
        if end > line.done_until:
            line.done_until = end
        if line.done_until > line.busy_until:
            self._changed()

    cdef _grow(self, Py_ssize_t room):
        cdef Line* line = &self.line
        cdef int64_t* starts = <int64_t*>malloc(2 * room * sizeof(int64_t))
        if not starts:
            raise MemoryError()
        if line.count:
            memcpy(starts, line.starts, line.count * sizeof(int64_t))
            memcpy(starts + room, line.ends, line.count * sizeof(int64_t))
        free(line.starts)
        line.starts = starts
        line.ends = starts + room
        line.room = room

    cdef _changed(self):
        """Tells the pools, which keep what the probe's loops need in arrays of their own."""
        cdef Line* line = &self.line
        cdef Py_ssize_t count = line.count
        cdef int64_t last = line.ends[count - 1] if count else 0
        cdef Py_ssize_t at
        line.busy_until = last if last > line.done_until else line.done_until
        for at in range(self.watch_count):
            (<Pool>self.watches[at].pool).note(self.watches[at].index, line)


def enter(uses):
    """See `timeline.enter`."""
    cdef BookedInterval use
    cdef Timeline line
    cdef Py_ssize_t entered = 0
    try:
        for use in uses:
            if use.start >= use.end:
                raise InternalError(f"batch {use.batch} books an empty interval")
            for line in use.timelines:
                line.insert(use)
                entered += 1
    except InternalError:
        for use in uses:
            for line in use.timelines:
                if entered:
                    line.remove(use)
                    entered -= 1
        raise
    for use in uses:
        use.live = True


def earliest_slot(timelines, int64_t not_before, int64_t duration):
    """See `timeline.earliest_slot`."""
    cdef Py_ssize_t agreed = 0, count = len(timelines)
    cdef int64_t start = not_before, slot
    cdef Timeline timeline
    while agreed < count:
        for timeline in timelines:
            slot = free_from(&timeline.line, start, duration)
            agreed = agreed + 1 if slot == start else 1
            start = slot
            if agreed >= count:
                break
    return start


# ---- pools ----

cdef class PoolMember:
    """See `pool.PoolMember`."""

    cdef readonly object agent
    cdef readonly Timeline gpu
    cdef readonly Timeline uplink
    cdef readonly Timeline downlink
    cdef readonly int64_t bytes_per_second

    def __init__(self, agent, Timeline gpu not None, Timeline uplink not None,
                 Timeline downlink not None, int64_t bytes_per_second):
        self.agent = agent
        self.gpu = gpu
        self.uplink = uplink
        self.downlink = downlink
        self.bytes_per_second = bytes_per_second


cdef struct Port:
    Line* downlink
    int64_t speed
    Py_ssize_t sender  # label that the data comes from; -1: none
    bint open  # whether a GPU behind it may start in time
    int64_t search  # number of the search that looked last
    int64_t length  # what it found
    int64_t sent


cdef class Pool:
    """See `pool.Pool`."""

    cdef readonly list members
    cdef readonly dict index_of
    cdef readonly int64_t fastest
    cdef readonly Py_ssize_t sharing
    cdef Py_ssize_t size
    cdef Py_ssize_t port_count
    cdef Py_ssize_t sender_count
    cdef int64_t* busy  # when each GPU becomes free for good
    cdef int64_t* last  # when its last interval ends: what is known to be used may end later
    cdef int64_t* gap  # no gap between two of its intervals is longer
    cdef int64_t* first  # when its first interval starts
    cdef Py_ssize_t* freed  # the GPUs by (busy, index): those that become free first before others
    cdef int64_t widest_gap  # no `gap` is longer
    cdef int64_t latest_first  # no `first` is later, of GPUs with intervals
    cdef int64_t overrun_until  # no `busy` is later that is not the end of an interval
    cdef int64_t searches
    cdef int64_t* speed
    cdef Py_ssize_t* port_of
    cdef Py_ssize_t* sender_of  # number of its uplink and speed
    cdef Line** gpu
    cdef Line** uplink
    cdef Line** downlink
    cdef Port* ports

    def __cinit__(self, list members):
        cdef Py_ssize_t index, size = len(members)
        self.size = size
        self.busy = <int64_t*>calloc(size, sizeof(int64_t))
        self.last = <int64_t*>calloc(size, sizeof(int64_t))
        self.gap = <int64_t*>calloc(size, sizeof(int64_t))
        self.first = <int64_t*>calloc(size, sizeof(int64_t))
        self.freed = <Py_ssize_t*>calloc(size, sizeof(Py_ssize_t))
        self.speed = <int64_t*>calloc(size, sizeof(int64_t))
        self.port_of = <Py_ssize_t*>calloc(size, sizeof(Py_ssize_t))
        self.sender_of = <Py_ssize_t*>calloc(size, sizeof(Py_ssize_t))
        self.gpu = <Line**>calloc(size, sizeof(Line*))
        self.uplink = <Line**>calloc(size, sizeof(Line*))
        self.downlink = <Line**>calloc(size, sizeof(Line*))
        self.ports = <Port*>calloc(size, sizeof(Port))
        if not (self.busy and self.last and self.gap and self.first and self.freed and self.speed
                and self.port_of and self.sender_of and self.gpu and self.uplink and self.downlink
                and self.ports):
            raise MemoryError()
        for index in range(size):
            self.freed[index] = index

    def __init__(self, list members):
        cdef PoolMember member
        cdef Py_ssize_t index, number
        self.members = members
        self.index_of = {m.agent: i for i, m in enumerate(members)}
        self.fastest = max(m.bytes_per_second for m in members)
        numbers = {}
        senders = {}
        for index in range(self.size):
            member = members[index]
            self.speed[index] = member.bytes_per_second
            self.gpu[index] = &member.gpu.line
            self.uplink[index] = &member.uplink.line
            self.downlink[index] = &member.downlink.line
            number = numbers.setdefault(
                (id(member.downlink), member.bytes_per_second), len(numbers)
            )
            self.port_of[index] = number
            self.sender_of[index] = senders.setdefault(
                (id(member.uplink), member.bytes_per_second), len(senders)
            )
            self.ports[number].downlink = &member.downlink.line
            self.ports[number].speed = member.bytes_per_second
        self.port_count = len(numbers)
        self.sender_count = len(senders)

    def __dealloc__(self):
        free(self.busy)
        free(self.last)
        free(self.gap)
        free(self.first)
        free(self.freed)
        free(self.speed)
        free(self.port_of)
        free(self.sender_of)
        free(self.gpu)
        free(self.uplink)
        free(self.downlink)
        free(self.ports)

    cdef void note(self, Py_ssize_t index, const Line* line) noexcept:
        cdef int64_t busy = line.busy_until, last = 0, first = NEVER
        if line.count:
            last = line.ends[line.count - 1]
            first = line.starts[0]
            if first > self.latest_first:
                self.latest_first = first
        if busy != self.busy[index]:
            reorder(self, index, busy)
        if busy > last and busy > self.overrun_until:
            self.overrun_until = busy
        if line.gap > self.widest_gap:
            self.widest_gap = line.gap
        self.last[index] = last
        self.gap[index] = line.gap
        self.first[index] = first

    def attach(self):
        """Starts to follow the members' timelines."""
        cdef PoolMember member
        cdef Py_ssize_t index
        self.sharing = 0
        for index in range(self.size):
            member = self.members[index]
            self.note(index, &member.gpu.line)
            self.sharing += member.gpu.has_steps
            member.gpu.watch([*member.gpu.watchers, (self, index)])

    def detach(self):
        """Stops following; the pool must not be probed any more."""
        cdef PoolMember member
        for member in self.members:
            member.gpu.watch([w for w in member.gpu.watchers if w[0] is not self])

    @property
    def order(self):
        """When each member's GPU becomes free for good, and its index, sorted."""
        return [(self.busy[self.freed[at]], self.freed[at]) for at in range(self.size)]

    def free_moments(self):
        """Returns when each member's GPU becomes free for good, as the pool sees it."""
        return [self.busy[index] for index in range(self.size)]

    def earliest_start(self, int64_t ready, int64_t duration):
        """See `pool.Pool.earliest_start`."""
        return earliest_start(self, ready, duration)


cdef inline Py_ssize_t place_of(Pool pool, int64_t moment, Py_ssize_t index) noexcept:
    """Number of GPUs that come before `(moment, index)` in the order."""
    cdef Py_ssize_t low = 0, high = pool.size, middle, other
    while low < high:
        middle = (low + high) >> 1
        other = pool.freed[middle]
        if pool.busy[other] < moment or (pool.busy[other] == moment and other < index):
            low = middle + 1
        else:
            high = middle
    return low


cdef void reorder(Pool pool, Py_ssize_t index, int64_t busy) noexcept:
    """Moves a GPU to its new place in the order."""
    cdef Py_ssize_t* order = pool.freed
    cdef Py_ssize_t old = place_of(pool, pool.busy[index], index)
    cdef Py_ssize_t new = place_of(pool, busy, index)
    if new > old:
        new -= 1  # it does not come before itself
        memmove(order + old, order + old + 1, (new - old) * sizeof(Py_ssize_t))
    else:
        memmove(order + new + 1, order + new, (old - new) * sizeof(Py_ssize_t))
    order[new] = index
    pool.busy[index] = busy


cdef inline bint starts_early(Pool pool, int64_t ready, int64_t duration) noexcept:
    """True if a GPU may start a batch that is ready then before it is free for good."""
    return (pool.widest_gap >= duration or pool.latest_first - ready >= duration
            or pool.overrun_until > ready) and look_closely(pool, ready, duration)


cdef bint look_closely(Pool pool, int64_t ready, int64_t duration) noexcept:
    """The same, after the bounds were made tight again."""
    cdef int64_t gap = 0, first = 0, overrun = 0
    cdef Py_ssize_t index
    for index in range(pool.size):
        if pool.gap[index] > gap:
            gap = pool.gap[index]
        if pool.first[index] > first and pool.first[index] != NEVER:
            first = pool.first[index]
        if pool.busy[index] > pool.last[index] and pool.busy[index] > overrun:
            overrun = pool.busy[index]
    pool.widest_gap = gap
    pool.latest_first = first
    pool.overrun_until = overrun
    return gap >= duration or first - ready >= duration or overrun > ready


# ---- the probe ----

cdef struct Hop:
    Py_ssize_t index
    int64_t sent
    int64_t length
    int64_t start
    int64_t duration


cdef struct Stage:
    int64_t* compute
    int64_t row_bytes
    Py_ssize_t* home  # member of the pool before -> the same agent in this one, or -1
    Py_ssize_t* away  # member -> the same agent in the pool before, or -1
    Label* labels  # of each member; those without one finish at NEVER
    Py_ssize_t* first  # labels of the senders, those that finish first before others


cdef struct Label:
    int64_t finish
    int64_t start
    int64_t sent
    int64_t length
    Py_ssize_t before  # member of the pool before


cdef class PathHop:
    """See `probe.PathHop`."""

    cdef readonly PoolMember member
    cdef readonly int64_t transfer_start
    cdef readonly int64_t transfer_ns
    cdef readonly int64_t start
    cdef readonly int64_t compute_ns

    def __init__(self, PoolMember member, int64_t transfer_start, int64_t transfer_ns, int64_t start,
                 int64_t compute_ns):
        self.member = member
        self.transfer_start = transfer_start
        self.transfer_ns = transfer_ns
        self.start = start
        self.compute_ns = compute_ns


cdef class Path:
    """See `probe.Path`."""

    cdef PoolChain chain
    cdef Hop* hops
    cdef readonly Py_ssize_t rows
    cdef readonly int64_t finish_ns
    cdef readonly int64_t wait_ns

    def __dealloc__(self):
        free(self.hops)

    @property
    def steps(self):
        """The hops of the path."""
        cdef Py_ssize_t i
        cdef Hop* hop
        cdef Pool pool
        cdef PathHop step
        cdef list steps = []
        for i in range(self.chain.count):
            hop = self.hops + i
            pool = self.chain.pools[i]
            step = PathHop.__new__(PathHop)
            step.member = pool.members[hop.index]
            step.transfer_start = hop.sent
            step.transfer_ns = hop.length
            step.start = hop.start
            step.compute_ns = hop.duration
            steps.append(step)
        return steps


cdef class PoolChain:
    """See `probe.PoolChain`."""

    cdef readonly tuple legs
    cdef readonly Py_ssize_t max_rows
    cdef readonly tuple least_work_ns
    cdef list pools
    cdef Py_ssize_t count
    cdef Stage* stages
    cdef int64_t* work
    cdef int64_t* rest  # least work behind each stage, by rows
    cdef Hop* scratch

    def __cinit__(self, legs):
        cdef Py_ssize_t i, rows, index
        cdef Pool pool, before = None
        self.legs = tuple(legs)
        self.count = len(self.legs)
        self.pools = [leg.pool for leg in self.legs]
        self.max_rows = min([len(leg.compute_ns) for leg in self.legs])
        self.stages = <Stage*>calloc(self.count, sizeof(Stage))
        self.scratch = <Hop*>calloc(self.count, sizeof(Hop))
        self.work = <int64_t*>calloc(self.max_rows, sizeof(int64_t))
        self.rest = <int64_t*>calloc(self.max_rows * self.count, sizeof(int64_t))
        if not self.stages or not self.scratch or not self.work or not self.rest:
            raise MemoryError()
        for i in range(self.count):
            leg = self.legs[i]
            pool = leg.pool
            self.stages[i].row_bytes = leg.row_bytes
            self.stages[i].compute = <int64_t*>calloc(self.max_rows, sizeof(int64_t))
            if not self.stages[i].compute:
                raise MemoryError()
            for rows in range(self.max_rows):
                self.stages[i].compute[rows] = leg.compute_ns[rows]
            self.stages[i].labels = <Label*>calloc(pool.size, sizeof(Label))
            self.stages[i].first = <Py_ssize_t*>calloc(pool.size, sizeof(Py_ssize_t))
            self.stages[i].away = <Py_ssize_t*>calloc(pool.size, sizeof(Py_ssize_t))
            if not self.stages[i].labels or not self.stages[i].first or not self.stages[i].away:
                raise MemoryError()
            for index in range(pool.size):
                agent = (<PoolMember>pool.members[index]).agent
                self.stages[i].away[index] = -1 if before is None else before.index_of.get(agent, -1)
            if before is not None:
                self.stages[i].home = <Py_ssize_t*>calloc(before.size, sizeof(Py_ssize_t))
                if not self.stages[i].home:
                    raise MemoryError()
                for index in range(before.size):
                    agent = (<PoolMember>before.members[index]).agent
                    self.stages[i].home[index] = pool.index_of.get(agent, -1)
            before = pool
        self._sum_up()

    cdef _sum_up(self):
        cdef Py_ssize_t i, rows
        cdef Pool pool, before
        cdef int64_t total
        for rows in range(1, self.max_rows + 1):
            total = 0
            for i in range(self.count - 1, -1, -1):
                self.rest[(rows - 1) * self.count + i] = total
                pool = self.pools[i]
                total += self.stages[i].compute[rows - 1]
                if i:
                    before = self.pools[i - 1]
                    if not before.index_of.keys() & pool.index_of.keys():
                        total += transfer_ns(
                            self.stages[i].row_bytes * rows, min(before.fastest, pool.fastest)
                        )
            self.work[rows - 1] = total
        self.least_work_ns = tuple([self.work[i] for i in range(self.max_rows)])

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.stages:
            for i in range(self.count):
                free(self.stages[i].compute)
                free(self.stages[i].home)
                free(self.stages[i].away)
                free(self.stages[i].labels)
                free(self.stages[i].first)
        free(self.stages)
        free(self.scratch)
        free(self.work)
        free(self.rest)

    def probe(self, Py_ssize_t rows, int64_t now):
        """Returns the path of a batch of `rows` that starts now."""
        if not 1 <= rows <= self.max_rows:
            raise IndexError(f"{rows} rows; planned are 1 to {self.max_rows}")
        return self._path(rows, now, self._search(rows, now, NEVER))

    def largest(self, Py_ssize_t most, int64_t deadline, int64_t now):
        """Returns the path of the largest batch up to `most` rows that meets the deadline."""
        cdef Py_ssize_t rows
        cdef int64_t finish
        for rows in range(min(most, self.max_rows), 0, -1):
            if now + self.work[rows - 1] <= deadline:
                finish = self._search(rows, now, deadline)
                if finish <= deadline:
                    return self._path(rows, now, finish)
        return None

    cdef Path _path(self, Py_ssize_t rows, int64_t now, int64_t finish):
        cdef Path path = Path.__new__(Path)
        cdef Py_ssize_t i
        cdef int64_t work = 0
        path.hops = <Hop*>malloc(self.count * sizeof(Hop))
        if not path.hops:
            raise MemoryError()
        for i in range(self.count):
            path.hops[i] = self.scratch[i]
            work += self.scratch[i].length + self.scratch[i].duration
        path.chain = self
        path.rows = rows
        path.finish_ns = finish
        path.wait_ns = finish - now - work
        return path

    cdef int64_t _no_earlier(self, Py_ssize_t rows, int64_t now, int64_t deadline) noexcept:
        """See `PoolChain._no_earlier`; anything after the deadline if that cannot be met."""
        cdef const int64_t* rest = self.rest + (rows - 1) * self.count
        cdef Py_ssize_t i
        cdef int64_t moment = now, duration
        for i in range(self.count):
            duration = self.stages[i].compute[rows - 1]
            if i:
                moment += rest[i - 1] - rest[i] - duration  # the transfer
            moment = earliest_start(<Pool>self.pools[i], moment, duration) + duration
            if moment + rest[i] > deadline:
                return NEVER
        return moment

    cdef int64_t _search(self, Py_ssize_t rows, int64_t now, int64_t deadline):
        """Sets the hops to the path that finishes first, and returns when that is.

        If no path meets the deadline, the hops are any, and so is the moment after the deadline.
        """
        cdef Py_ssize_t i
        cdef int64_t moment = now, no_earlier = self._no_earlier(rows, now, deadline)
        cdef Stage* stage
        cdef Hop* hop
        cdef Pool pool, before = None
        if no_earlier > deadline:
            return no_earlier
        for i in range(self.count):
            stage = self.stages + i
            hop = self.scratch + i
            pool = <Pool>self.pools[i]
            hop.duration = stage.compute[rows - 1]
            if pool.sharing:
                if before is None or stage.row_bytes == 0:
                    beside_steps(pool, NULL, 0, home_of(before, stage, self.scratch, i), moment, 0, hop)
                else:
                    beside_steps(
                        pool, before.uplink[self.scratch[i - 1].index],
                        before.speed[self.scratch[i - 1].index],
                        home_of(before, stage, self.scratch, i), moment, stage.row_bytes * rows, hop,
                    )
            elif before is None or stage.row_bytes == 0:
                without_transfer(pool, moment, hop)
            else:
                with_transfer(
                    pool, before.uplink[self.scratch[i - 1].index],
                    before.speed[self.scratch[i - 1].index], stage.home[self.scratch[i - 1].index],
                    moment, stage.row_bytes * rows, hop,
                )
            moment = hop.start + hop.duration
            before = pool
        hop = self.scratch
        if moment > no_earlier and moment > hop.start + hop.duration + self.rest[(rows - 1) * self.count]:
            return self._search_labels(rows, now, moment if moment <= deadline else deadline + 1)
        return moment

    cdef int64_t _search_labels(self, Py_ssize_t rows, int64_t now, int64_t known):
        """Sets the hops to the path that finishes first, if it does before `known`."""
        cdef const int64_t* rest = self.rest + (rows - 1) * self.count
        cdef Py_ssize_t i, index, last = self.count - 1
        cdef Pool pool, before = None
        cdef Label* label
        cdef Hop* hop
        for i in range(self.count):
            pool = <Pool>self.pools[i]
            if i == 0:
                start_labels(pool, self.stages, rows, now, known - rest[0])
            else:
                next_labels(pool, before, self.stages + i, self.stages + i - 1, rows, known - rest[i])
            if first_label(pool, self.stages[i].labels) < 0:
                return known
            before = pool
        index = first_label(pool, self.stages[last].labels)
        for i in range(last, -1, -1):
            label = self.stages[i].labels + index
            hop = self.scratch + i
            hop.index = index
            hop.sent = label.sent
            hop.length = label.length
            hop.start = label.start
            hop.duration = label.finish - label.start
            index = label.before
        return self.stages[last].labels[self.scratch[last].index].finish


cdef inline BookedInterval booked(batch, Py_ssize_t position, tuple timelines, int64_t start,
                                  int64_t length):
    """A new interval, without the detour by `__init__`."""
    cdef BookedInterval use = BookedInterval.__new__(BookedInterval)
    use.batch = batch
    use.position = position
    use.timelines = timelines
    use.start = start
    use.end = start + length
    return use


def uses_of(batch, steps):
    """See `probe.uses_of`."""
    cdef Py_ssize_t position = 0
    cdef PathHop step
    cdef PoolMember sender = None
    cdef list uses = []
    for step in steps:
        if step.transfer_ns and sender is not None:
            uses.append(
                booked(batch, position, (sender.uplink, step.member.downlink), step.transfer_start,
                       step.transfer_ns)
            )
        uses.append(booked(batch, position, (step.member.gpu,), step.start, step.compute_ns))
        sender = step.member
        position += 1
    return uses


cdef inline bint precedes(Pool pool, const Label* labels, Py_ssize_t one, Py_ssize_t other) noexcept:
    """See `Label.is_before`."""
    cdef int64_t busy = pool.busy[one], others = pool.busy[other]
    cdef bint fills, other_fills
    if labels[one].finish != labels[other].finish:
        return labels[one].finish < labels[other].finish
    fills = busy > labels[one].start
    other_fills = others > labels[other].start
    if fills != other_fills:
        return other_fills
    return busy > others or (busy == others and one > other)


cdef Py_ssize_t first_label(Pool pool, const Label* labels) noexcept:
    """Index of the member that finishes first; -1 if none has a label."""
    cdef Py_ssize_t index, found = -1
    for index in range(pool.size):
        if labels[index].finish != NEVER and (found < 0 or precedes(pool, labels, index, found)):
            found = index
    return found


cdef inline void set_label(Pool pool, Py_ssize_t index, Label* label, int64_t ready, int64_t duration,
                           int64_t latest) noexcept:
    """Sets when a member that has the data at `ready` finishes, if that is before `latest`."""
    cdef int64_t start, spent = duration
    label.finish = NEVER
    if hopeless(pool, index, ready, duration, latest - duration - 1):
        return
    if pool.sharing:
        spent = with_steps(pool.gpu[index], ready, duration)
    if ready + spent >= latest:
        return
    start = ready
    if pool.busy[index] > ready:
        start = free_from(pool.gpu[index], ready, spent)
        pool.gap[index] = pool.gpu[index].gap
    if start + spent < latest:
        label.start = start
        label.finish = start + spent


cdef void start_labels(Pool pool, Stage* stage, Py_ssize_t rows, int64_t now, int64_t latest) noexcept:
    cdef Py_ssize_t index
    cdef Label* label
    for index in range(pool.size):
        label = stage.labels + index
        label.sent = now
        label.length = 0
        label.before = -1
        set_label(pool, index, label, now, stage.compute[rows - 1], latest)


cdef Py_ssize_t senders_of(Pool pool, Stage* stage) noexcept:
    """Sorts the first label of every uplink, and returns their number."""
    cdef Py_ssize_t* first = stage.first
    cdef const Label* labels = stage.labels
    cdef Py_ssize_t index, number, count = 0, at, one
    for number in range(pool.sender_count):
        first[number] = -1
    for index in range(pool.size):
        if labels[index].finish != NEVER:
            number = pool.sender_of[index]
            if first[number] < 0 or precedes(pool, labels, index, first[number]):
                first[number] = index
    for number in range(pool.sender_count):
        one = first[number]
        if one < 0:
            continue
        at = count
        while at and (labels[first[at - 1]].finish > labels[one].finish or (
            labels[first[at - 1]].finish == labels[one].finish and first[at - 1] > one
        )):
            first[at] = first[at - 1]
            at -= 1
        first[at] = one
        count += 1
    return count


cdef void next_labels(Pool pool, Pool before, Stage* stage, Stage* ahead, Py_ssize_t rows,
                      int64_t latest) noexcept:
    """See `label_search`; `ahead` is the stage before, with its labels."""
    cdef int64_t duration = stage.compute[rows - 1], nbytes = stage.row_bytes * rows
    cdef int64_t best, length, moment, sent, speed, first, least
    cdef Py_ssize_t number, at, count, index, home, sender
    cdef Port* port
    cdef Label* label
    cdef const Label* labels = ahead.labels
    count = senders_of(before, ahead) if nbytes else 0
    sender = first_label(before, labels)
    first = labels[sender].finish
    least = transfer_ns(nbytes, before.fastest if before.fastest < pool.fastest else pool.fastest)
    for number in range(pool.port_count):
        pool.ports[number].open = False
    for index in range(pool.size):  # no search for ports behind which every GPU is booked too far
        if not hopeless(pool, index, first + least, duration, latest - duration - 1):
            pool.ports[pool.port_of[index]].open = True
    for number in range(pool.port_count):
        port = pool.ports + number
        if nbytes == 0:
            port.sent = labels[sender].finish
            port.length = 0
            port.sender = sender
            continue
        best = latest - duration
        port.sender = -1
        if not port.open:
            continue
        for at in range(count):
            sender = ahead.first[at]
            if labels[sender].finish + least >= best:
                break  # and all others finish later
            speed = before.speed[sender]
            length = transfer_ns(nbytes, speed if speed < port.speed else port.speed)
            moment = labels[sender].finish
            while moment + length < best:
                sent = free_from(before.uplink[sender], moment, length)
                moment = free_from(port.downlink, sent, length)
                if moment == sent:
                    break
            if moment + length < best:
                best = moment + length
                port.sent = moment
                port.length = length
                port.sender = sender
    for index in range(pool.size):
        label = stage.labels + index
        port = pool.ports + pool.port_of[index]
        label.finish = NEVER
        label.before = port.sender
        label.sent = port.sent
        label.length = port.length
        home = stage.away[index]
        if home >= 0 and labels[home].finish != NEVER:
            if port.sender < 0 or labels[home].finish <= port.sent + port.length:
                label.before = home
                label.sent = labels[home].finish
                label.length = 0
        if label.before >= 0:
            set_label(pool, index, label, label.sent + label.length, duration, latest)


cdef struct Best:
    Py_ssize_t index
    int64_t start
    int64_t busy
    bint fills  # a gap


cdef inline bint hopeless(Pool pool, Py_ssize_t index, int64_t ready, int64_t duration,
                          int64_t best_start) noexcept:
    """True if a GPU, with data at `ready` or later, surely starts after `best_start`."""
    return (pool.last[index] > best_start and pool.gap[index] < duration
            and pool.first[index] - ready < duration)


cdef inline bint consider(Pool pool, Py_ssize_t index, int64_t ready, int64_t duration,
                          Best* best) noexcept:
    """Takes a GPU if it starts earlier than the best so far, or as early and ranks before it."""
    cdef int64_t busy = pool.busy[index], start
    cdef bint fills
    if ready > best.start:
        return False
    if busy <= ready:
        start = ready
    else:
        start = free_from(pool.gpu[index], ready, duration)
        pool.gap[index] = pool.gpu[index].gap
        if start > best.start:
            return False
    fills = busy > start
    if start == best.start:
        if fills != best.fills:
            if fills:
                return False
        elif busy < best.busy or (busy == best.busy and index < best.index):
            return False
    best.index = index
    best.start = start
    best.busy = busy
    best.fills = fills
    return True


cdef int64_t earliest_start(Pool pool, int64_t ready, int64_t duration) noexcept:
    """See `Pool.earliest_start`."""
    cdef int64_t best = pool.busy[pool.freed[0]], start
    cdef Py_ssize_t index
    if best <= ready:
        return ready
    if starts_early(pool, ready, duration):
        for index in range(pool.size):
            if not hopeless(pool, index, ready, duration, best - 1):
                start = free_from(pool.gpu[index], ready, duration)
                pool.gap[index] = pool.gpu[index].gap
                if start < best:
                    best = start
    return best


cdef inline Py_ssize_t idle_by(Pool pool, int64_t moment) noexcept:
    """Number of GPUs that are free for good by then: the first ones in the order."""
    return place_of(pool, moment, pool.size)


cdef void without_transfer(Pool pool, int64_t moment, Hop* hop) noexcept:
    cdef Py_ssize_t index, idle = idle_by(pool, moment)
    cdef const Py_ssize_t* order = pool.freed
    cdef Best best
    hop.sent = moment
    hop.length = 0
    if idle:
        hop.index = order[idle - 1]
        hop.start = moment
        return
    best.index = -1
    best.start = NEVER
    best.busy = -1
    best.fills = True
    consider(pool, order[0], moment, hop.duration, &best)
    if starts_early(pool, moment, hop.duration):
        for index in range(pool.size):
            if not hopeless(pool, index, moment, hop.duration, best.start):
                consider(pool, index, moment, hop.duration, &best)
    else:  # those that become free together with the first
        for index in range(1, pool.size):
            if not consider(pool, order[index], moment, hop.duration, &best):
                break
    hop.index = best.index
    hop.start = best.start


cdef void with_transfer(Pool pool, Line* uplink, int64_t speed, Py_ssize_t home, int64_t moment,
                        int64_t nbytes, Hop* hop) noexcept:
    cdef Py_ssize_t at, index
    cdef int64_t slowest, length, sent, arrival
    slowest = speed if speed < pool.fastest else pool.fastest
    length = transfer_ns(nbytes, slowest)
    sent = free_from(uplink, moment, length)
    arrival = sent + length
    if home < 0:
        for at in range(idle_by(pool, arrival) - 1, -1, -1):
            index = pool.freed[at]
            if pool.speed[index] < slowest and transfer_ns(nbytes, pool.speed[index]) != length:
                continue
            if free_from(pool.downlink[index], sent, length) == sent:
                hop.index = index
                hop.sent = sent
                hop.length = length
                hop.start = arrival
                return
    look_at_all(pool, uplink, speed, home, moment, nbytes, arrival, hop)


cdef inline Py_ssize_t home_of(Pool before, const Stage* stage, const Hop* scratch, Py_ssize_t i) noexcept:
    """Index of the member that has the data already; -1 if none has."""
    return -1 if before is None else stage.home[scratch[i - 1].index]


cdef void beside_steps(Pool pool, Line* uplink, int64_t speed, Py_ssize_t home, int64_t moment,
                       int64_t nbytes, Hop* hop) noexcept:
    """Every GPU is examined, since they take different times; without `uplink` nothing is sent."""
    cdef Py_ssize_t index, found = -1
    cdef int64_t duration = hop.duration, ready, spent, start, busy, finish
    cdef int64_t best_finish = NEVER, best_busy = -1
    cdef bint fills, best_fills = True, better
    cdef Port* port
    pool.searches += 1
    for index in range(pool.size):
        port = pool.ports + pool.port_of[index]
        if port.search != pool.searches:
            port.search = pool.searches
            port.length = 0
            port.sent = moment
            if uplink != NULL:
                port.length = transfer_ns(nbytes, speed if speed < port.speed else port.speed)
                port.sent = both_free(uplink, port.downlink, moment, port.length)
        ready = moment if index == home else port.sent + port.length
        spent = with_steps(pool.gpu[index], ready, duration)
        start = free_from(pool.gpu[index], ready, spent)
        pool.gap[index] = pool.gpu[index].gap
        busy = pool.busy[index]
        finish = start + spent
        fills = busy > start
        better = found < 0 or finish < best_finish
        if not better and finish == best_finish:
            if fills != best_fills:
                better = best_fills
            else:
                better = busy >= best_busy  # of equals the later one
        if better:
            found = index
            best_finish = finish
            best_fills = fills
            best_busy = busy
            hop.sent = moment if index == home else port.sent
            hop.length = 0 if index == home else port.length
            hop.start = start
            hop.duration = spent
    hop.index = found


cdef inline void receive(Pool pool, Py_ssize_t index, Line* uplink, int64_t speed, int64_t moment,
                         int64_t nbytes, Hop* hop, Best* best) noexcept:
    """Considers a GPU that gets the data over the network."""
    cdef Port* port = pool.ports + pool.port_of[index]
    if port.search != pool.searches:
        port.search = pool.searches
        port.length = transfer_ns(nbytes, speed if speed < port.speed else port.speed)
        port.sent = both_free(uplink, port.downlink, moment, port.length)
    if consider(pool, index, port.sent + port.length, hop.duration, best):
        hop.sent = port.sent
        hop.length = port.length


cdef void look_at_all(Pool pool, Line* uplink, int64_t speed, Py_ssize_t home, int64_t moment,
                      int64_t nbytes, int64_t arrival, Hop* hop) noexcept:
    """`arrival` is the earliest at which data can be anywhere but at home."""
    cdef Py_ssize_t at, index, first = pool.freed[0]
    cdef Best best
    best.index = -1
    best.start = NEVER
    best.busy = -1
    best.fills = True
    pool.searches += 1
    if home >= 0 and consider(pool, home, moment, hop.duration, &best):
        hop.sent = moment
        hop.length = 0
    if first != home:
        receive(pool, first, uplink, speed, moment, nbytes, hop, &best)
    if starts_early(pool, arrival, hop.duration):
        for index in range(pool.size):
            if index != home and not hopeless(pool, index, arrival, hop.duration, best.start):
                receive(pool, index, uplink, speed, moment, nbytes, hop, &best)
    else:
        for at in range(1, pool.size):
            index = pool.freed[at]
            if pool.busy[index] > best.start:
                break  # as do all others
            if index != home:
                receive(pool, index, uplink, speed, moment, nbytes, hop, &best)
    hop.index = best.index
    hop.start = best.start
