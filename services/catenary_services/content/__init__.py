"""Content identity: what the files of a model version are, byte for byte, wherever they lie.

Beside the files of a version lies `content.json`, a *content record*: the SHA-256 and size of every
file that anybody loads, and one digest of the whole version, which is the same on every machine
that has the same content.

    record    the record: its form, its digest, its checks
    making    a record of a folder's files
    hashing   digests of files and of ranges of them, each computed once while a file stays as it is
    reading   checks files against a record while somebody reads them
"""
