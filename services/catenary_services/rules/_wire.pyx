# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, nonecheck=False
"""Checks of a message's rules on its bytes, before they are parsed.

There is one table for each type of message, indexed by field number, which `walking` makes from the
same bounds as the Python checker. The bytes are hostile: nothing is read behind `end`, and nothing
is written but numbers at places that the table has counted. Bytes that a parser might understand in
another way (a field that occurs twice is merged, a number of too many bits is cut) are not
accepted.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

cdef enum:
    MOST_NOTES = 24  # numbers kept by a walk through one message: counts, and fields in relations
    MOST_PARTS = 4  # summands of one sum
    MOST_FIELDS = 64  # fields of one message, with one bit each
    MOST_NUMBER = 1_023  # the highest field number
    DEEPEST = 32  # the deepest nesting of messages

    VARINT = 0
    FIXED64 = 1
    DELIMITED = 2
    FIXED32 = 5

# Kinds of values on the wire; `walking` has the same numbers.
cdef enum:
    UNKNOWN = 0
    UNSIGNED = 1
    SIGNED = 2
    ZIGZAG = 3
    TRUTH = 4
    UNSIGNED_32 = 5
    SIGNED_32 = 6
    UNSIGNED_64 = 7
    SIGNED_64 = 8
    FLOAT = 9
    DOUBLE = 10
    CHARACTERS = 11
    OCTETS = 12
    MESSAGE = 13

cdef struct Sum:
    int count
    int parts[MOST_PARTS]  # the notes that are added up
    uint64_t plus
    int into  # the note that receives the sum

cdef struct Relation:
    Sum sum  # its `into` is the note that bounds it; -1 for `most`
    uint64_t most
    bint is_same  # whether it says that the texts at the first two notes are equal

cdef struct Table:
    Field* fields  # indexed by field number
    uint32_t most_number
    int notes
    uint64_t needed  # bits of fields that must be present
    Relation* relations
    int relation_count

cdef struct Field:
    uint8_t kind
    uint8_t wire
    bint is_repeated
    int note  # place of its number, its count, or its text's address and length; -1 for none
    uint64_t bit
    uint64_t alone  # bits of fields it may not follow: itself, and others of its oneof
    uint64_t most_items
    uint64_t low  # bounds of unsigned numbers
    uint64_t high
    int64_t lowest  # bounds of signed numbers
    int64_t highest
    double least
    double most
    bint is_bounded  # whether a floating-point number has bounds
    bint is_required  # whether a text must not be empty
    uint64_t max_len
    const uint8_t* begins  # ASCII characters with which a text may begin; NULL for any
    const uint8_t* goes_on  # ASCII characters it may have behind the first
    void* form  # a callable that matches all other texts; NULL for none
    const Table* inside
    Sum* sums  # sums of an inner message's notes, whose maxima are notes of this one
    int sum_count


cdef inline const uint8_t* varint(const uint8_t* at, const uint8_t* end, uint64_t* value) noexcept:
    """Reads a varint; returns its end, NULL if it has none or too many bits."""
    cdef uint64_t read = 0, byte
    cdef int shift = 0
    while at < end:
        byte = at[0]
        at += 1
        if shift == 63 and byte > 1:
            return NULL
        read |= (byte & 0x7F) << shift
        if byte < 0x80:
            value[0] = read
            return at
        shift += 7
    return NULL


cdef inline const uint8_t* number(
    const Field* field, int wire, const uint8_t* at, const uint8_t* end, uint64_t* value
) noexcept:
    """Reads a number of a field; returns its end, NULL if the number is not allowed."""
    cdef uint64_t raw = 0
    cdef int64_t signed
    cdef int width, index
    cdef uint32_t half
    cdef float single
    cdef double real
    if wire == VARINT:
        if at < end and at[0] < 0x80:
            raw = at[0]
            at += 1
        else:
            at = varint(at, end, &raw)
            if at == NULL:
                return NULL
    else:
        width = 8 if wire == FIXED64 else 4
        if end - at < width:
            return NULL
        for index in range(width):
            raw |= (<uint64_t>at[index]) << (8 * index)
        at += width
    value[0] = raw
    if field.kind == UNSIGNED or field.kind == UNSIGNED_32 or field.kind == UNSIGNED_64:
        return at if field.low <= raw and raw <= field.high else NULL
    if field.kind == TRUTH:
        raw = raw != 0
        return at if field.low <= raw and raw <= field.high else NULL
    if field.kind == FLOAT or field.kind == DOUBLE:
        if field.kind == FLOAT:
            half = <uint32_t>raw
            memcpy(&single, &half, 4)
            real = single
        else:
            memcpy(&real, &raw, 8)
        if not field.is_bounded or (isfinite(real) and field.least <= real and real <= field.most):
            return at
        return NULL
    if field.kind == SIGNED or field.kind == SIGNED_64:
        signed = <int64_t>raw
    elif field.kind == SIGNED_32:
        signed = <int32_t><uint32_t>raw
    elif field.kind == ZIGZAG:
        signed = <int64_t>((raw >> 1) ^ (0 - (raw & 1)))
    else:
        return NULL
    return at if field.lowest <= signed and signed <= field.highest else NULL


cdef int is_text(const Field* field, const uint8_t* text, uint64_t size) except -1:
    """Returns whether a text keeps the rules of its field; the parser checks the UTF-8."""
    cdef uint64_t index, characters = 0
    if size == 0:
        return not field.is_required
    if size > field.max_len:
        if field.kind == OCTETS:
            return False
        for index in range(size):
            characters += (text[index] & 0xC0) != 0x80
        if characters > field.max_len:
            return False
    if field.form == NULL:
        return True
    if field.begins != NULL and text[0] < 0x80:
        if not field.begins[text[0]]:
            return False
        index = 1
        while index < size and text[index] < 0x80:
            if not field.goes_on[text[index]]:
                return False
            index += 1
        if index == size:
            return True
    try:
        return bool((<object>field.form)(PyUnicode_DecodeUTF8(<const char*>text, size, NULL)))
    except UnicodeDecodeError:
        return False


cdef int add(const Sum* sum, const uint64_t* notes, uint64_t* total) noexcept:
    """Adds notes up; returns whether the sum fits into 64 bits."""
    cdef int index
    total[0] = sum.plus
    for index in range(sum.count):
        total[0] += notes[sum.parts[index]]
        if total[0] < notes[sum.parts[index]]:
            return False
    return True


cdef int hold(const Table* table, const uint64_t* notes) noexcept:
    """Returns whether the relations between fields hold."""
    cdef const Relation* relation
    cdef uint64_t total = 0
    cdef int index, one, other
    for index in range(table.relation_count):
        relation = &table.relations[index]
        if relation.is_same:
            one, other = relation.sum.parts[0], relation.sum.parts[1]
            if notes[one + 1] != notes[other + 1]:
                return False
            if notes[one + 1] and memcmp(
                <const void*>notes[one], <const void*>notes[other], notes[one + 1]
            ):
                return False
            continue
        if not add(&relation.sum, notes, &total):
            return False
        if total > (relation.most if relation.sum.into < 0 else notes[relation.sum.into]):
            return False
    return True


cdef int walk(
    const Table* table, const uint8_t* at, const uint8_t* end, uint64_t* notes, int depth
) except -1:
    """Returns whether a message keeps its rules; leaves numbers for relations in `notes`."""
    cdef uint64_t inner[MOST_NOTES]
    cdef uint64_t seen = 0, key = 0, value = 0, size = 0
    cdef const Field* field
    cdef const uint8_t* packed
    cdef int wire, index
    if depth > DEEPEST:
        return False
    memset(notes, 0, table.notes * sizeof(uint64_t))
    while at < end:
        if at[0] < 0x80:
            key = at[0]
            at += 1
        else:
            at = varint(at, end, &key)
            if at == NULL:
                return False
        wire = key & 7
        key >>= 3
        if key == 0 or key >= 1 << 29:
            return False
        if key > table.most_number or table.fields[key].kind == UNKNOWN:
            if wire == VARINT:
                at = varint(at, end, &value)
                if at == NULL:
                    return False
                continue
            if wire == DELIMITED:
                at = varint(at, end, &size)
                if at == NULL:
                    return False
            elif wire == FIXED64:
                size = 8
            elif wire == FIXED32:
                size = 4
            else:
                return False
            if size > <uint64_t>(end - at):
                return False
            at += size
            continue
        field = &table.fields[key]
        if not field.is_repeated:
            if wire != field.wire or seen & field.alone:
                return False
            seen |= field.bit
            if wire != DELIMITED:
                at = number(field, wire, at, end, &value)
                if at == NULL:
                    return False
                if field.note >= 0:
                    notes[field.note] = value
                continue
        elif wire != DELIMITED:
            if wire != field.wire:
                return False
            notes[field.note] += 1
            at = number(field, wire, at, end, &value)
            if at == NULL or notes[field.note] > field.most_items:
                return False
            continue
        at = varint(at, end, &size)
        if at == NULL or size > <uint64_t>(end - at):
            return False
        if field.is_repeated:
            if field.wire != DELIMITED:  # packed numbers
                packed = at + size
                while at < packed:
                    notes[field.note] += 1
                    at = number(field, field.wire, at, packed, &value)
                    if at == NULL or notes[field.note] > field.most_items:
                        return False
                continue
            notes[field.note] += 1
            if notes[field.note] > field.most_items:
                return False
        if field.kind == MESSAGE:
            if not walk(field.inside, at, at + size, inner, depth + 1):
                return False
            for index in range(field.sum_count):
                if not add(&field.sums[index], inner, &value):
                    return False
                if value > notes[field.sums[index].into]:
                    notes[field.sums[index].into] = value
        else:
            if not is_text(field, at, size):
                return False
            if field.note >= 0 and not field.is_repeated:
                notes[field.note] = <uint64_t>at
                notes[field.note + 1] = size
        at += size
    if table.needed & ~seen:
        return False
    return hold(table, notes) if table.relation_count else True


cdef int write(Sum* sum, tuple what) except -1:
    """Fills a sum from a triple: notes to add up, a constant, the note that receives it."""
    parts, sum.plus, sum.into = what
    sum.count = len(parts)
    if sum.count > MOST_PARTS:
        raise ValueError(f"{sum.count} parts of a sum; {MOST_PARTS} are possible")
    for index in range(sum.count):
        sum.parts[index] = place(parts[index])
    place(max(sum.into, 0))
    return 0


cdef int place(int note) except -1:
    if not 0 <= note < MOST_NOTES - 1:  # a text takes two places
        raise ValueError(f"there is no place {note} for a note")
    return note


cdef class WireTable:
    """The rules for the bytes of one type of message."""

    cdef Table table
    cdef Field* owned
    cdef object kept  # keeps alive the objects that the table points to

    def __init__(self, object fields, tuple relations, int notes):
        """Takes `walking.WireField`s, sums with their bounds, and the number of notes."""
        if self.owned != NULL:
            raise ValueError("a table is made once")
        cdef uint32_t most = max([each.number for each in fields], default=0)
        if len(fields) > MOST_FIELDS or most > MOST_NUMBER or notes > MOST_NOTES:
            raise ValueError("a message has more fields than a table is made for")
        self.kept = []
        self.owned = <Field*>calloc(most + 1, sizeof(Field))
        self.table.relations = <Relation*>calloc(len(relations) + 1, sizeof(Relation))
        if self.owned == NULL or self.table.relations == NULL:
            raise MemoryError
        self.table.fields = self.owned
        self.table.most_number = most
        self.table.notes = notes
        for index, (sum, most_) in enumerate(relations):
            self.table.relations[index].is_same = most_ is None
            self.table.relations[index].most = most_ or 0
            write(&self.table.relations[index].sum, sum)
            self.table.relation_count += 1
        for each in fields:
            self.take(each)

    cdef int take(self, object each) except -1:
        cdef Field* field = &self.owned[<uint32_t>each.number]
        cdef bytes ascii
        field.wire, field.is_repeated, field.note = each.wire, each.is_repeated, each.note
        place(field.note if field.is_repeated else max(field.note, 0))
        field.bit, field.alone, field.most_items = each.bit, each.alone, each.most_items
        if each.kind in (UNSIGNED, TRUTH, UNSIGNED_32, UNSIGNED_64):
            field.low, field.high = each.low, each.high
        elif each.kind in (SIGNED, ZIGZAG, SIGNED_32, SIGNED_64):
            field.lowest, field.highest = each.low, each.high
        elif each.kind in (FLOAT, DOUBLE):
            field.least, field.most, field.is_bounded = each.low, each.high, each.is_bounded
        elif each.kind in (CHARACTERS, OCTETS):
            field.is_required, field.max_len = each.is_required, each.high
            if each.form is not None:
                self.kept.append(each.form)
                field.form = <void*>each.form
            if each.ascii is not None:
                ascii = each.ascii
                if len(ascii) != 256:
                    raise ValueError("a table of characters has two times 128 entries")
                self.kept.append(ascii)
                field.begins = <const uint8_t*>PyBytes_AS_STRING(ascii)
                field.goes_on = field.begins + 128
        elif each.kind == MESSAGE:
            self.kept.append(each.inside)
            field.inside = &(<WireTable?>each.inside).table
            field.sums = <Sum*>calloc(len(each.sums) + 1, sizeof(Sum))
            if field.sums == NULL:
                raise MemoryError
            for sum in each.sums:
                write(&field.sums[field.sum_count], sum)
                field.sum_count += 1
        else:
            raise ValueError(f"nothing is written as {each.kind}")
        field.kind = each.kind
        if each.is_needed:
            self.table.needed |= field.bit
        return 0

    def walk(self, data):
        """Returns True if a message keeps its rules; False if it must be parsed and checked."""
        cdef uint64_t notes[MOST_NOTES]
        cdef const uint8_t* begin
        cdef Py_buffer view
        if PyBytes_CheckExact(data):
            begin = <const uint8_t*>PyBytes_AS_STRING(data)
            return walk(&self.table, begin, begin + PyBytes_GET_SIZE(data), notes, 0) == 1
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            begin = <const uint8_t*>view.buf
            return walk(&self.table, begin, begin + view.len, notes, 0) == 1
        finally:
            PyBuffer_Release(&view)

    def __dealloc__(self):
        cdef uint32_t number
        if self.owned != NULL:
            for number in range(self.table.most_number + 1):
                free(self.owned[number].sums)
        free(self.owned)
        free(self.table.relations)
