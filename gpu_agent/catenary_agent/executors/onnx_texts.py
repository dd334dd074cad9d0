"""Texts on their way into and out of ONNX Runtime.

Tensors of BYTES are arrays of `bytes` everywhere else; a session takes and gives arrays of `str`,
because texts of ONNX are UTF-8.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from catenary_services.errors import InvalidInput

Array = np.ndarray[Any, np.dtype[Any]]


def to_texts(array: Array, name: str) -> Array:
    """Returns an array as a session takes it: texts where it has elements of BYTES.

    Raises:
        InvalidInput: An element is not UTF-8; the field is `name`.
    """
    if array.dtype != np.object_:
        return array
    texts = np.empty(array.shape, np.object_)
    flat = texts.reshape(-1)
    for index, element in enumerate(array.reshape(-1)):
        try:
            flat[index] = element.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(name, f"element {index} is not UTF-8: {error}") from None
    return texts


def to_elements(array: Array) -> Array:
    """Returns an array that a session gave, with elements of BYTES where it has texts."""
    if array.dtype != np.object_:
        return array
    elements = np.empty(array.shape, np.object_)
    flat = elements.reshape(-1)
    for index, text in enumerate(array.reshape(-1)):
        flat[index] = text.encode()
    return elements
