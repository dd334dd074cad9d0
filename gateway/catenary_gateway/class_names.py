"""Names of the classes that a vision model tells apart, read from the files of its version.

`labels.txt` has one a line, the first for class 0. A model exported from Hugging Face has them in
`config.json` instead, as `id2label`. Most models have neither, and their classes are numbers.
"""

from __future__ import annotations

import asyncio
import json
from itertools import takewhile

from catenary_gateway.catalog import Catalog, Model
from catenary_gateway.generation.text.text_codec import TextCodecs
from catenary_services.bounded_files import LARGEST_CONFIG_BYTES
from catenary_services.content.reading import VerifiedReading
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import CatenaryError, Unavailable
from catenary_services.log import get_logger

LABELS_FILE = "labels.txt"
CONFIG_FILE = "config.json"
LONGEST_NAME = 200
"""Most characters of a name; what is behind is cut off."""
_WAIT_S = 5.0
_RETRY_NS = 5_000_000_000

_log = get_logger("catenary_gateway.class_names")

Names = tuple[str, ...]


class ClassNames:
    """The class names of the models in a catalog, each read once, in a thread."""

    def __init__(self, catalog: Catalog, codecs: TextCodecs) -> None:
        """Reads the files where `codecs` has those of tokenizers, and fetches them likewise."""
        self._catalog = catalog
        self._codecs = codecs
        self._reads: dict[tuple[ModelKey, str], asyncio.Future[Names]] = {}

    async def of(self, name: str, version: str, wait_s: float = _WAIT_S) -> Names:
        """Returns the names by class number; empty if the model has none.

        Its files are waited for `wait_s` seconds.

        Raises:
            ModelNotFound: The model or version is not served.
            Unavailable: Its files cannot be read, or have not come yet.
        """
        model = self._catalog.find(name, version)
        self._forget_others()
        read = self._reading(model)
        try:
            async with asyncio.timeout(wait_s):
                # A caller that is cancelled must not cancel the reading that others wait for.
                return await asyncio.shield(read)
        except TimeoutError:
            why = "its files have not come yet"
        except (CatenaryError, OSError, ValueError, RecursionError) as error:
            why = "its files cannot be read"
            _log.warning("class_names_not_read", model=model.label, why=str(error))
        text = f"the classes of {model.label} have no names: {why}"
        raise Unavailable(text, retry_after_ns=_RETRY_NS)

    def _reading(self, model: Model) -> asyncio.Future[Names]:
        at = (model.key, model.content_digest)
        read = self._reads.get(at)
        if read is None or (read.done() and read.exception() is not None):
            read = asyncio.ensure_future(asyncio.to_thread(self._read, model.key))
            # Nobody may be left to take note of its failure.
            read.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._reads[at] = read
        return read

    def _forget_others(self) -> None:
        served = {(model.key, model.content_digest) for model in self._catalog.models()}
        for at in self._reads.keys() - served:
            del self._reads[at]

    def _read(self, key: ModelKey) -> Names:
        self._codecs.prepare(key)
        with self._codecs.repository.reading(key) as reading:
            return names_in(reading)


def names_in(files: VerifiedReading) -> Names:
    """Returns the class names in a version's files; empty if there are none.

    Raises:
        ValueError: A file is malformed.
        CatenaryError: A file is not what was recorded, or cannot be brought in.
    """
    try:
        lines = files.content(LABELS_FILE, LARGEST_CONFIG_BYTES).decode().splitlines()
        return tuple(line.strip()[:LONGEST_NAME] for line in lines)
    except FileNotFoundError:
        pass
    try:
        config = json.loads(files.content(CONFIG_FILE, LARGEST_CONFIG_BYTES))
    except FileNotFoundError:
        return ()
    named = config.get("id2label") if isinstance(config, dict) else None
    if not isinstance(named, dict):
        return ()
    in_order = (named.get(str(number)) for number in range(len(named)))
    return tuple(str(name)[:LONGEST_NAME] for name in takewhile(lambda n: n is not None, in_order))
