"""The page of clients agrees with its record, and with what `make ecosystem` runs."""

from __future__ import annotations

import re

from cluster_harness import ROOT
from docs_build.client_tables import PAGE, STATES, TITLES, clients, recorded, tables

REQUIREMENTS = ROOT / "requirements" / "ecosystem"
SCRIPTS = ROOT / "tests" / "ecosystem" / "clients"


def test_the_page_says_what_the_record_does() -> None:
    assert tables() in PAGE.read_text(), "`python -m docs_build.client_tables` writes it anew"


def test_every_client_has_requirements_a_script_a_title_and_a_record() -> None:
    scripts = sorted(script.stem for script in SCRIPTS.glob("*/*.py"))
    assert clients() == scripts == sorted(TITLES) == list(recorded())


def test_requirements_are_exact_releases() -> None:
    for name in clients():
        lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        assert pins
        assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+(\[[\w,]+\])?==[\w.]+", pin)] == []


def test_the_record_is_of_the_release_that_is_installed() -> None:
    for name, client in recorded().items():
        if name == "open_webui":  # its calls are made by hand
            continue
        (first, *_) = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
        assert first.endswith(f"=={client.version}"), name


def test_what_does_not_work_has_a_reason() -> None:
    for name, client in recorded().items():
        assert client.features, name
        for each in client.features:
            assert each.state in STATES, (name, each)
            assert bool(each.reason) == (each.state != "works"), (name, each)
