"""What all tests of the documents look at, made once."""

from __future__ import annotations

import pytest

from docs_build.pages import generated_pages


@pytest.fixture(scope="session")
def generated() -> dict[str, str]:
    """The pages that only the built site has, by their place in it."""
    return generated_pages()
