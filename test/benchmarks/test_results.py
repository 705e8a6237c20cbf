"""The page of evidence is what files say, and pages print no figure that is in none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import provenance, results, results_figure, results_pages
from benchmarks.papers.published.points import POINTS, Published, Quantity, label
from benchmarks.results_claims import VERDICTS, gap, number, verdict
from benchmarks.results_pages import Figure, PageText, expanded
from benchmarks.statistics import effect

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a page, a registry and a file of results of its own."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "cost.json").write_text('{"alone": {"10": 8.44, "50": 0.0123}}')
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "quoted.toml").write_text(REGISTRY)
    for name, value in (("ROOT", tmp_path), ("HOME", tmp_path)):
        monkeypatch.setattr(results_pages, name, value)
    monkeypatch.setattr(results_pages, "REGISTRY", tmp_path / "quoted.toml")
    for cached in (results_pages.registry, results_pages.read, results_pages.source):
        cached.cache_clear()
    return tmp_path


@pytest.fixture(autouse=True)
def fresh() -> None:
    for cached in (results_pages.registry, results_pages.read):
        cached.cache_clear()


PAGE = """# Title

A query costs 8.4 ms, and
.012 at last; ε = 0.5 is a setting, `1.5` is code, 1.6 s was timed.

## Table

| | 10 | 50 |
|---|---|---|
| alone | **8.4** (p .01) | 8 |
"""
REGISTRY = """
[[quote]]
page = "README.md"
says = "A query costs # ms, and # at last"
are = "json/cost:alone.{10,50}"

[[table]]
page = "README.md"
section = "Table"
from = "json/cost"
columns = ["10 50", "10"]
[table.rows]
alone = "alone"

[[unsourced]]
page = "README.md"
says = "# s was timed"
why = "by hand"

[[setting]]
pattern = 'ε = [0-9.]+'
"""


def changed(pages: Path, old: str, new: str) -> list[str]:
    """What is wrong once the page says something else."""
    text = (pages / "README.md").read_text()
    assert text.count(old) == 1
    (pages / "README.md").write_text(text.replace(old, new))
    return results_pages.check_pages(["README.md"])


def test_the_page_and_all_figures_are_what_files_say() -> None:
    results_pages.source.cache_clear()
    assert results.check() == []
    said = results.PAGE.read_text()
    assert all(f"| {kind} |" in said for kind in VERDICTS)
    assert "nan" not in said.lower().split()


def test_a_page_with_figures_of_files_passes(pages: Path) -> None:
    assert results_pages.check_pages(["README.md"]) == []
    assert "“… s was timed”: by hand" in results_pages.unsourced()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("costs 8.4 ms", "costs 8.5 ms", "says 8.5, json/cost:alone.10 is 8.44"),
        (".012 at", ".0124 at", "says .0124"),
        ("**8.4**", "**8.3**", "README.md:10: says 8.3"),
        ("| 8 |", "| never |", "says 'never', json/cost:alone.10 is 8.44"),
        ("| alone |", "| solo |", "quoted.toml has no row 'solo'"),
        ("was timed.", "was timed, 2.5 more.", "2.5 is in no entry of quoted.toml"),
        ("was timed.", "was timed, 30 % more.", "30 is in no entry of quoted.toml"),
        ("A query costs", "One costs", "is there nowhere, not once"),
    ],
)
def test_what_files_do_not_say_is_found(pages: Path, old: str, new: str, said: str) -> None:
    assert any(said in line for line in changed(pages, old, new))


def test_figures_are_written_anew_as_they_were_printed(pages: Path) -> None:
    (pages / "results" / "cost.json").write_text('{"alone": {"10": 9.26, "50": 0.0304}}')
    assert results_pages.rewrite_pages() == ["README.md"]
    results_pages.read.cache_clear()
    assert results_pages.check_pages(["README.md"]) == []
    text = (pages / "README.md").read_text()
    assert text == PAGE.replace("8.4", "9.3").replace(".012", ".030").replace(
        ".01)", ".03)"
    ).replace("| 8 |", "| 9 |")


@pytest.mark.parametrize(
    ("text", "value", "same"),
    [
        (".406", 0.4064, True),
        (".406", 0.4066, False),
        ("5e-05", 4.84e-5, True),
        ("5e-05", 5.6e-5, False),
        ("24,187", 24187.0, True),
        ("-.3", -0.28, True),
        ("−.3", -0.28, True),
        ("7.8e7", 78083500.0, True),
    ],
)
def test_a_figure_is_compared_as_it_is_rounded(text: str, value: float, same: bool) -> None:
    assert Figure(text, 0).says(value) == same


def test_keys_with_alternatives_are_written_out() -> None:
    assert expanded("a:{b,c.d}.{1,2}") == ["a:b.1", "a:b.2", "a:c.d.1", "a:c.d.2"]


def test_a_comma_behind_a_figure_is_none_of_it() -> None:
    assert results_pages.TOKEN.findall("[8, 17], 24,187.") == ["8", "17", "24,187"]


def test_a_doctest_is_no_figure(pages: Path) -> None:
    text = "Said 0.1:\n\n>>> study(\n...     epsilon=2.5)\n>>> noise(1e-5)\n\nIt took 0.2 s.\n"
    (pages / "examples.rst").write_text(text)
    assert [figure.text for figure in PageText("examples.rst").unaccounted()] == ["0.1", "0.2"]


def test_tables_of_several_outcomes_and_fidelities_have_their_keys() -> None:
    results_pages.source.cache_clear()
    means = results_pages.source("fidelity/mlp-digits")
    gap = means["alone, fidelities"]["minus"]["alone"]["8"]["mean"]
    assert gap == pytest.approx(means["alone, fidelities"]["8"] - means["alone"]["8"])
    assert means["BoTorch, fidelities"]["8"] is None  # beyond its budget
    assert results_pages.value_of("outcomes/alone:network-front.alone.5.p") is None
    assert results_pages.value_of("fidelity_tasks/mlp-digits:27") == pytest.approx(1)


def test_code_is_no_figure() -> None:
    page = PageText("README.md")
    start = page.text.index("```python")
    assert page.figures(start, page.text.index("```", start + 3)) == []


def test_what_is_typed_at_a_prompt_is_no_figure(pages: Path) -> None:
    (pages / "docs").mkdir()
    (pages / "docs" / "page.rst").write_text(
        ">>> advise(\n...     epsilon=2.5)\n0.75\n\nIt takes 1.5 s.\n\n"
        ".. code-block:: bash\n\n   account --delta 1e-5\n"
    )
    page = PageText("docs/page.rst")
    assert [figure.text for figure in page.unaccounted()] == ["0.75", "1.5"]


# ------------------------------------------------------------------ the picture


def test_the_picture_shows_what_summaries_say() -> None:
    results_pages.source.cache_clear()
    shown = results_figure.shown()
    for suite, panel in shown.items():
        summary = results_pages.source(f"transfer/{suite}")
        for method, line in panel.items():
            known = summary[method]
            for query in (1, 5, 20):
                said = line["regret"][query - 1]
                assert said == pytest.approx(known["regret_at"][str(query)], abs=1e-4)
                if method != "solo":
                    below = known["vs_solo"][str(query)]["high"] < 0
                    assert (query in line["ahead"]) == below


def test_a_picture_of_other_figures_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_figure, "PICTURE", tmp_path / "regret.svg")
    assert not results_figure.is_current()
    drawn = (ROOT / "docs" / "_static" / "regret.svg").read_text()
    results_figure.PICTURE.write_text(drawn)
    assert results_figure.is_current()
    first = str(results_figure.shown()["tuning"]["fts"]["regret"][0])
    results_figure.PICTURE.write_text(drawn.replace(first, "0.1234"))
    assert not results_figure.is_current()


def test_the_picture_follows_the_reader_s_scheme() -> None:
    pytest.importorskip("matplotlib")
    svg = results_figure.draw()
    assert results_figure.draw() == svg  # no date, no random names
    stored = results_figure.PICTURE.read_text()
    by = [re.findall(r"Matplotlib v[\d.]+", text) for text in (stored, svg)]
    assert by[0] != by[1] or stored == svg  # other versions place lines elsewhere
    texts = {"".join(text.itertext()).strip() for text in ElementTree.fromstring(svg).iter()}
    assert texts >= {
        *results_figure.PANELS.values(),
        *(label for label, *_ in results_figure.LINES.values()),
    }
    (style, _) = svg.split("</style>", 1)
    light, dark = (
        dict(re.findall(r"--([\w-]+):(#[0-9a-f]{6})", half))
        for half in style.split("prefers-color-scheme:dark")
    )
    used = set(re.findall(r"var\(--([\w-]+)\)", svg))
    assert used == light.keys() == dark.keys() >= {"ink", "paper", "fts", "solo", "sobol"}
    for scheme in (light, dark):
        for name in used - {"paper", "grid"}:
            assert _contrast(scheme[name], scheme["paper"]) >= 4.5, name
    places = {place for place, *_ in results_figure.PLACES.values()}
    assert not [place for place in places if place in svg]


def _contrast(one: str, other: str) -> float:
    """The ratio that WCAG 2 defines."""
    levels = sorted(_luminance(colour) for colour in (one, other))
    return (levels[1] + 0.05) / (levels[0] + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# ------------------------------------------------------------------ verdicts and points


def test_a_verdict_is_a_side_of_zero() -> None:
    above, open_ = effect([0.1, 0.12, 0.11, 0.13]), effect([0.1, -0.2, 0.15, -0.1])
    assert verdict(above, "above") == "reproduced"
    assert verdict(above, "below") == verdict(open_, "above") == "not reproduced"
    assert verdict(None, "above") == verdict(effect([0.1]), "above") == "not run"


def test_numbers_are_short() -> None:
    assert (number(0.1234), number(-0.5, 1), number(1234.5, 0)) == (".123", "-.5", "1,234")
    assert gap(effect([-0.1, -0.3]), 1) == "−.2 [−1.5, +1.1]"


def test_a_row_is_the_papers_only_if_it_meets_what_is_printed() -> None:
    clipped = Quantity("share clipped", 0.01, 0.005, 0.03, lambda line: line["clipped"])
    point = Published("A", "Fig. 1", "a/b", "paper", (clipped,), "ours")
    assert point.called([{"clipped": 0.02}, {"clipped": 0.03}]) == "paper"
    assert point.called([{"clipped": 0.4}]) == point.called([]) == "ours"
    assert point.misses([{"clipped": 0.4}]) == ["share clipped"]
    other = Published("A", "Fig. 1", "a/b", "paper", (clipped,), "ours", departs="starts")
    assert other.called([{"clipped": 0.01}]) == "ours"


def test_summaries_say_what_a_row_may_be_called() -> None:
    rescaled = [{"moments_epsilon": 9.9085, "clipped": 0.4}]
    name = label("dp_fts_de/synthetic", "dp-fts-de-2", rescaled)
    assert name == "dp-fts-de-2 (the paper's search, our scale)"
    assert label("dp_fts_de/synthetic", "ts", rescaled) == "ts"
    assert len({(point.entry, point.row) for point in POINTS}) == len(POINTS)


# ------------------------------------------------------------------ what lines depend on


def test_lines_of_other_code_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, file = tmp_path / "method.py", tmp_path / "runs" / "a.jsonl"
    source.write_text("one = 1\n")
    file.parent.mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "HOME", tmp_path)
    monkeypatch.setattr(provenance, "FAMILIES", {"runs": ("method.py",)})
    provenance.code_of.cache_clear()
    before = provenance.code_for(file)
    file.write_text(f"{json.dumps(before)}\n{json.dumps({'no': 'hash'})}\n")
    (age,) = provenance.ages()
    assert (age.now, age.earlier, age.unknown, age.commits) == (1, 0, 1, None)
    assert age.stale
    source.write_text('"""In other words."""\n\n# And more of them.\none = 1\n')
    provenance.code_of.cache_clear()
    assert provenance.code_for(file) == before
    source.write_text("one = 2\n")
    provenance.code_of.cache_clear()
    file.write_text(f"{json.dumps(before)}\n{json.dumps(provenance.code_for(file))}\n")
    (age,) = provenance.ages()
    assert (age.now, age.earlier, age.unknown) == (1, 1, 0)
    assert age.stale
    provenance.code_of.cache_clear()


def test_strings_that_are_no_docstrings_are_code() -> None:
    source = 'def f():\n    """A docstring\n    of two lines."""\n    return "# one"  # two\n'
    assert provenance.code_in(source) == 'def f():\n    return "# one"  # two\n'
    assert provenance.code_in(source.replace("# one", "# 1")) != provenance.code_in(source)


@pytest.mark.parametrize(
    ("family", "files"),
    [
        ("fts", ("fts.py", "landmine.py", "activity.py", "own_gp.py", "thompson.py")),
        ("dp_fts_de", ("fleet.py", "digits.py", "exploration.py", "mechanisms.py", "noisy.py")),
        ("fed_gp", ("cec2005.py", "risk.py", "fbo_fedgp.py", "region.py", "secure_sum.py")),
        ("private_ucb", ("bandits.py", "separable.py", "tree.py", "bandit.py", "repair.py")),
    ],
)
def test_what_decides_lines_is_among_the_sources(family: str, files: tuple[str, ...]) -> None:
    known = {path.name for path in provenance.sources(f"papers/results/{family}")}
    assert set(files) <= known
    assert not known & {"points.py", "printed.py"}  # what is compared with them


def test_every_family_has_sources_and_results() -> None:
    for family in provenance.FAMILIES:
        assert provenance.sources(family)
        assert any((provenance.HOME / family).rglob("*.jsonl"))
    assert provenance.code_for(Path("elsewhere.jsonl")) == {}
