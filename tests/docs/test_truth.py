"""`make truth CHECK=1`: pages, records and scenarios agree, and a changed digit of any of them is found."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.peers.record import Cell, Comparison, PeerFacts, Settings, save
from catenary_scheduler.settings import SchedulerSettings
from cluster_harness import ROOT
from docs_build import truth
from docs_build.truth_settings import unlike_deployment

PAGES = ("docs/results/server-chains.md", "docs/results/kv-packing.md", "docs/benchmarks.md")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Pages, records, pictures and scenarios, to be changed."""
    shutil.copytree(ROOT / "scenarios", tmp_path / "scenarios")
    shutil.copytree(ROOT / "docs/results", tmp_path / "docs/results")
    for file in (ROOT / "docs/benchmarks.md", *(ROOT / "docs").glob("*.json")):
        shutil.copy(file, tmp_path / "docs" / file.name)
    return tmp_path


def change(path: Path, edit: Callable[[str], str]) -> None:
    text = path.read_text()
    assert edit(text) != text
    path.write_text(edit(text))


def other_digit(text: str, at: int) -> str:
    return f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"


def test_pages_records_and_scenarios_agree() -> None:
    assert list(truth.problems()) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_changed_digit_of_a_page_is_found(page: str, copy: Path) -> None:
    made = (copy / page).read_text()
    digits = [found.start() for found in re.finditer(r"\d", made)]
    for at in (digits[0], digits[len(digits) // 2], digits[-1]):
        (copy / page).write_text(other_digit(made, at))
        assert any(page in line for line in truth.problems(copy))


def test_a_changed_digit_of_a_prose_figure_is_found(copy: Path) -> None:
    page = copy / "docs/results/kv-packing.md"
    figure = re.search(r"All targets are met\*\*: (\d)", page.read_text())
    assert figure is not None
    change(page, lambda text: other_digit(text, figure.start(1)))
    (found,) = truth.problems(copy)
    assert "All targets are met" in found


def test_a_digit_in_a_record_changes_the_pages_tables_and_prose(copy: Path) -> None:
    record = copy / "docs/results/packing-targets.json"
    before = truth.pages(copy)[Path("docs/results/kv-packing.md")]
    value = json.loads(record.read_text())
    caption = value["page"]["tables"][1]["caption"]
    row = value["page"]["tables"][1]["rows"][0]
    row[1] = other_digit(row[1], 0)
    record.write_text(json.dumps(value))
    after = truth.pages(copy)[Path("docs/results/kv-packing.md")]
    changed = [
        line
        for line, old in zip(after.splitlines(), before.splitlines(), strict=True)
        if line != old
    ]
    assert caption == "GPUs, mean over time"
    assert any(line.startswith(f"| {row[0]} |") for line in changed)
    assert any("All targets are met" in line for line in changed)


@pytest.mark.parametrize("where", [0.01, 0.3, 0.6, 0.999])
def test_a_changed_digit_of_a_record_is_found_wherever_it_is(where: float, copy: Path) -> None:
    record = copy / "docs/results/table-1.json"
    text = record.read_text()
    digits = [found.start() for found in re.finditer(r"(?<=[.])\d", text)]
    record.write_text(other_digit(text, digits[int(where * len(digits))]))
    assert any("table-1" in line for line in truth.problems(copy))


def test_a_comparison_with_other_servers_is_on_its_page_and_sealed(copy: Path) -> None:
    cells = tuple(
        Cell(peer, "tiny", "http", 16, (9,), (0,), (rate,), (1.0,), (2.0,), (3.0,))
        for peer, rate in (("catenary", 500.0), ("triton", 1000.0))
    )
    facts = {each: PeerFacts(each.title(), "1.0") for each in ("catenary", "triton")}
    settings = Settings(3, 1, 1.25, False, True, {"grpc": "h2load", "http": "h2load"})
    made = {"commit": "0" * 40, "date": "2026-11-26", "machine": "a test", "from": "the run"}
    record = copy / "docs/peers.json"
    save(Comparison(facts, {"tiny": 0.02}, cells, settings, made), record)
    page = truth.pages(copy)[Path("docs/results/peers.md")]
    assert "| tiny, HTTP, 16 in flight: rate over Triton's | **0.5 x** | 0.8 |" in page
    assert "| Catenary | HTTP | 500 (0.50) |" in page
    assert "3 rounds of 1.25 s by h2load" in page
    assert "at commit 0000000000, 2026-11-26, a test" in page
    change(record, lambda text: text.replace("500.0", "900.0"))
    assert any("the record of peers" in line for line in truth.problems(copy))


def test_a_changed_digit_of_a_bench_is_found(copy: Path) -> None:
    change(
        copy / "docs/benchmarks.json",
        lambda text: re.sub(r'("value": )\d', r"\g<1>77", text, count=1),
    )
    assert any("digest" in line for line in truth.problems(copy))


def test_a_scenario_with_other_settings_is_found(copy: Path) -> None:
    change(
        copy / "scenarios/gpu-ratio.yaml",
        lambda text: text.replace("duration_s: 5", "duration_s: 9"),
    )
    assert list(truth.problems(copy)) == [
        "the settings of gpu-ratio are not its record's: run it again"
    ]


def test_a_record_that_misses_a_limit_of_its_scenario_is_found(copy: Path) -> None:
    record = copy / "docs/results/load-factors.json"
    value = json.loads(record.read_text())
    row = value["page"]["tables"][0]["rows"][0]
    assert row[0] == "Catenary"
    row[-1] = 0.98
    record.write_text(json.dumps(value))
    missed = "missed: load-factors: load factor, our plans is 0.98, the limit 0.99"
    assert missed in truth.problems(copy)


def test_limits_are_no_settings_and_stand_on_the_page(copy: Path) -> None:
    change(copy / "scenarios/load-factors.yaml", lambda text: text.replace("0.97}", "0.96}"))
    missed, page = sorted(truth.problems(copy))
    assert missed == "MISSED names load-factors: load factor, PPipe's plans, which is not missed"
    assert "| load factor, PPipe's plans | **0.9688** | 0.97 |" in page


def test_a_scenario_without_a_record_and_a_record_without_a_scenario_are_found(copy: Path) -> None:
    (copy / "scenarios/new.yaml").write_text("kind: sensitivity\n")
    shutil.copy(copy / "docs/results/margin.json", copy / "docs/results/old.json")
    found = list(truth.problems(copy))
    assert "new has no record" in found
    assert "the record of old has no scenario" in found
    assert "the record of old is on no page" in found


def test_a_picture_of_another_run_is_found(copy: Path) -> None:
    shutil.copy(copy / "docs/results/margin.png", copy / "docs/results/table-1.png")
    assert list(truth.problems(copy)) == ["picture table-1.png is not that of the record"]


def test_a_page_without_a_template_is_found(copy: Path) -> None:
    (copy / "docs/results/more.md").write_text("It took 3 s.\n")
    assert list(truth.problems(copy)) == [
        "docs/results/more.md has no template in docs_build/truth_pages"
    ]


def test_an_exception_that_no_longer_applies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(truth.OTHER_SETTINGS, "margin", "for a test")
    monkeypatch.setitem(truth.UNRENDERED, "tuning", "for a test")
    monkeypatch.setitem(truth.MISSED, "load-factors: load factor, our plans", "for a test")
    assert list(truth.problems()) == [
        "MISSED names load-factors: load factor, our plans, which is not missed",
        "OTHER_SETTINGS names margin, whose settings are its scenario's",
        "UNRENDERED names tuning, which has a record",
    ]


def test_another_default_of_the_product_changes_what_a_page_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"kind": "sensitivity", "vary": "gpu_ratio", "values": ["2:14"]}
    said = unlike_deployment("scenarios/x.yaml", settings)
    assert not any("plan_margin" in each for each in said)
    field = SchedulerSettings.model_fields["plan_margin"]
    monkeypatch.setattr(field, "default", 0.25)
    said = unlike_deployment("scenarios/x.yaml", settings)
    assert "`plan_margin` 0.4 (default 0.25)" in said


def test_settings_of_the_scheduler_in_a_scenario_are_named() -> None:
    settings = {"kind": "live", "scheduler": {"scale_down_window_s": 10}}
    said = unlike_deployment("scenarios/placement/x.yaml", settings)
    policy = "`chain_policy` slo (default least-time)"
    assert said == [policy, "`scale_down_window_s` 10 (default 30.0)"]


def test_settings_of_a_record_are_known_by_the_names_of_its_day() -> None:
    settings = {"kind": "live", "scheduler": {"scale_patience_s": 10}}
    said = unlike_deployment("scenarios/placement/x.yaml", settings)
    policy = "`chain_policy` slo (default least-time)"
    assert said == [policy, "`scale_down_window_s` 10 (default 30.0)"]


def test_a_commit_that_history_does_not_have_has_no_age(tmp_path: Path) -> None:
    assert truth.age_of("0" * 40) is None
    assert truth.age_of("HEAD", tmp_path) is None
