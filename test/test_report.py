"""Figures and reports show what the results say."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed import report
from botorch_fed.acquisition import Constant
from botorch_fed.aggregation.stream import Trust
from botorch_fed.federation.base import Objective
from botorch_fed.federation.disclosure import Row, Sees
from botorch_fed.privacy import (
    DistributedGaussianSum,
    InsecureSeededNoise,
    NoiseSource,
    OSNoise,
    PoissonSampling,
    SignalWarning,
    gaussian_epsilon,
    gaussian_mu,
)
from botorch_fed.privacy.accounting import Event, Ledger
from botorch_fed.privacy.audit import AuditReport, Claim, audit_transcripts
from botorch_fed.report import plot_audit, write_report
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, run
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB
from botorch_fed.test_functions import KernelBandit, SyntheticGPAgents

pytest.importorskip("matplotlib")


def _report(distance: float) -> AuditReport:
    """An audit of one Gaussian release of mu = 1, in truth of the given mu."""

    def sampler(present: bool, runs: range) -> torch.Tensor:
        stream = generator(0, "test report", int(present), runs.start)
        return stream.normal(len(runs)) + (distance if present else 0.0)

    guarantee = Ledger().spend(Event(1.0)).guarantee(delta=1e-3)
    claim = Claim((guarantee,), mu=1.0)
    return audit_transcripts(sampler, claim, subject="a test", rounds=1, private=True, runs=300)


@pytest.mark.parametrize(("distance", "passed"), [(1.0, True), (3.0, False)])
def test_the_figure_carries_verdict_and_every_check(
    distance: float, passed: bool, tmp_path: object
) -> None:
    audited = _report(distance)
    assert audited.passed is passed
    figure = plot_audit(audited)
    errors, shares = figure.axes
    assert ("passed" if passed else "FAILED") in figure.get_suptitle()
    bars = [patch.get_width() for patch in shares.patches]
    assert len(bars) == len(audited.checks)
    assert [width <= 1 for width in bars] == [check.passed for check in audited.checks]
    squares = errors.lines[-1].get_xydata()
    assert len(squares) == len(audited.points)
    least = audited.claim.least_misses(torch.from_numpy(squares[:, 0].copy()))
    assert bool((torch.from_numpy(squares[:, 1].copy()) >= least).all()) is passed
    figure.savefig(f"{tmp_path}/audit.png", dpi=40)


# ------------------------------------------------------------------ the report of a run

SPACE = SearchSpace(
    (
        Parameter.real("rate", 1e-4, 1.0, scale="log"),
        Parameter.integer("depth", 1, 8),
        Parameter.choice("kernel", ["rbf", "poly"]),
    ),
    Outcome(minimize=True),
)
CHEAP = Strategy(num_raw=32, num_restarts=2, num_features=32, schedule=Constant(0.5), prior_until=2)
ALONE = replace(CHEAP, schedule=Constant(1.0), prior_until=0)
HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(2)'>",
    "</svg></style><iframe>",
    "$\\frac{1} & _x ]]> -->",
    "_hidden name that goes on and on and on and on",
    'a id="b" #1a1b1c {}',
)
VOID = {"meta", "br", "img", "link", "input"}


def _dish(shift: float) -> Objective:
    def objective(X: torch.Tensor) -> torch.Tensor:
        value = (X[:, :2] - 0.4 - shift).square().sum(dim=-1) + 0.1 * X[:, 2]
        return value.reshape(-1, 1)

    return objective


def _fts(names: Sequence[str] = ("a", "b", "c"), **options: Any) -> RunResult:
    objectives = {name: _dish(0.1 * n) for n, name in enumerate(names)}
    settings = {"budget": 6, "strategy": CHEAP, "every": 2, **options}
    absent = settings.pop("absent", None)
    return run(FTS(**settings), objectives, seed=0, space=SPACE, absent=absent, progress=False)


def _de(epsilon: float = 2.0, seeded: bool = False, **options: Any) -> RunResult:
    problem = SyntheticGPAgents(6, seed=0, perturbed="all", lengthscale=0.1)
    noise: NoiseSource = InsecureSeededNoise(0) if seeded else OSNoise()
    settings = {"budget": 6, "num_initial": 2, "delta": 1e-3, "noise": noise, "releases": "all"}
    settings |= {"min_reliability": 0.0, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)  # few agents
        return run(DPFTSDE(epsilon=epsilon, **settings), problem, seed=0, progress=False)


def _fed(**options: Any) -> RunResult:
    square = SearchSpace((Parameter.real("u", 0.0, 1.0), Parameter.real("v", 0.0, 1.0)))
    objectives = {name: lambda X: -(X - 0.3).square().sum(-1, keepdim=True) for name in "abc"}
    protocol = FedGP(budget=5, num_initial=3, channel="plain", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)  # few agents
        return run(protocol, objectives, seed=0, space=square, progress=False)


def _bandit(trust: Trust = "joint") -> RunResult:
    problem = KernelBandit(num_agents=3, seed=0)
    options: dict[str, Any] = {} if trust == "none" else {"epsilon": 10.0}
    if trust != "public":
        options["decision_sets"] = lambda name, t: problem.decision_set(int(name[5:]), t)
    return run(PrivateUCB(budget=6, trust=trust, **options), problem, seed=0, progress=False)


# Of what several tests look at, one run and one page are made.
_shared_fts, _shared_private = cache(_fts), cache(_de)


@pytest.fixture(scope="module")
def fts() -> RunResult:
    return _shared_fts()


@pytest.fixture(scope="module")
def tiny() -> RunResult:
    return _fts(["a"], budget=1, every=1)


@pytest.fixture(scope="module")
def private() -> RunResult:
    return _shared_private()


@pytest.fixture(scope="module")
def seeded() -> RunResult:
    return _de(seeded=True)


@pytest.fixture(scope="module")
def looser() -> RunResult:
    return _de(8.0)


@pytest.fixture(scope="module")
def fts_page(fts: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return _page(fts, tmp_path_factory.mktemp("fts"))


@pytest.fixture(scope="module")
def tiny_page(tiny: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return _page(tiny, tmp_path_factory.mktemp("tiny"))


class Page(HTMLParser):
    """A report as elements: raises unless every one is closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.text = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.tables: dict[str, list[list[str]]] = {}
        self.numbers: dict[str, list[list[float]]] = {}
        self._caption = ""
        self.feed(self.text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self.tables.setdefault(self._caption, []).append([])
            self.numbers.setdefault(self._caption, []).append([])
        if tag in ("th", "td"):
            self.tables[self._caption][-1].append("")
        if tag == "data":
            self.numbers[self._caption][-1].append(float(str(dict(attrs)["value"])))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.words += data
        if "caption" in self.open:
            self._caption += data
        if {"th", "td"} & set(self.open):
            self.tables[self._caption][-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def table(self, start: str) -> tuple[list[list[str]], list[list[float]]]:
        (caption,) = [name for name in self.tables if name.startswith(start)]
        return self.tables[caption], self.numbers[caption]

    @property
    def titles(self) -> list[str]:
        return re.findall(r"<h2[^>]*>(.*?)</h2>", self.text)


def _page(result: RunResult, folder: Path, **options: Any) -> Page:
    path = folder / "report.html"
    assert write_report(result, path, **options) == path
    return Page(path)


def _check_accessible(page: Page) -> None:
    names = [a["id"] for _, a in page.elements if a.get("id")]
    assert len(set(names)) == len(names)
    targets = [str(a["href"]) for _, a in page.elements if "href" in a]
    targets += [f"#{name}" for name in re.findall(r"url\(#([^)]*)\)", page.text)]
    assert {target.removeprefix("#") for target in targets} <= set(names)
    figures = [a for a in page.all("svg") if a.get("aria-hidden") != "true"]
    assert figures
    assert all(a["role"] == "img" and a["aria-label"] for a in figures)
    for one, many in (("table", "caption"), ("figure", "figcaption"), ("section", "h2")):
        assert len(page.all(one)) == len(page.all(many))
    assert len(page.all("h1")) == 1
    assert all("scope" in attributes for attributes in page.all("th"))
    assert page.all("html") == [{"lang": "en"}]


RUNS: dict[str, tuple[Callable[[], RunResult], list[str]]] = {
    "fts": (_shared_fts, ["No privacy guarantee", "all agents are trusted with every message"]),
    "private": (
        _shared_private,
        ["ε ≤ 2 and δ = 0.001, per agent", "zero-out", "not against the server"],
    ),
    "sums": (_fed, ["No privacy guarantee", "The server reads each agent's contribution"]),
    "noisy sums": (
        lambda: _fed(
            search=SupportSearch(support_size=4, num_raw=32, num_restarts=2, noise_var=1e-2),
            mechanism=lambda dim, n: DistributedGaussianSum(
                dim=dim, num_agents=n, clip_norm=20.0, noise_multiplier=2.0
            ),
            noise_at="agent",
        ),
        ["The guarantee.", "dp-accounting-rdp", "per agent"],
    ),
    "joint": (_bandit, ["ε ≤ 10 and δ = 1e-05, per record", "replace-one", "reads every record"]),
    "local": (lambda: _bandit("local"), ["per record", "No party is trusted"]),
    "public": (lambda: _bandit("public"), ["per record", "actions are public"]),
    "none": (lambda: _bandit("none"), ["No privacy guarantee", "There is no privacy guarantee"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_report_is_one_page_that_says_what_is_promised(name: str, tmp_path: Path) -> None:
    make, said = RUNS[name]
    page = _page(make(), tmp_path)
    for words in said:
        assert words in page.words
    lower = page.text.lower()
    for word in ("http://", "https://", "src=", "<script", "@import", "<link", "file:", "nan"):
        assert word not in lower, word
    assert set(re.findall(r"url\(.", page.text)) <= {"url(#"}
    assert "default-src 'none'" in page.text
    assert str(tmp_path) not in page.text
    _check_accessible(page)


def test_hostile_names_stay_words(tmp_path: Path) -> None:
    result = _fts(HOSTILE, budget=2)
    plain = _page(_fts([f"agent{n}" for n in range(len(HOSTILE))], budget=2), tmp_path)
    strange = replace(
        result,
        protocol=HOSTILE[0],
        versions={HOSTILE[1]: HOSTILE[2]},
        space=SearchSpace(
            (
                Parameter.real(HOSTILE[1], 1e-4, 1.0, scale="log"),
                Parameter.integer(HOSTILE[0], 1, 8),
                Parameter.choice(HOSTILE[2], [HOSTILE[0], HOSTILE[3]]),
            ),
            SPACE.outcome,
        ),
        rounds=[{**row, "replied": False, "failure": HOSTILE[0]} for row in result.rounds],
        privacy={"mechanism": HOSTILE[0], "private": False, "channel": HOSTILE[1]},
        sees=Sees(
            (Row(HOSTILE[0], "server", HOSTILE[1], ("agents",), "data"),),
            trust=HOSTILE[2],
            limits=(HOSTILE[3],),
        ),
    )
    page = _page(strange, tmp_path, title=HOSTILE[1], others={HOSTILE[0]: result})
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {"line"}
    known = {key for _, attributes in plain.elements for key in attributes}
    assert {key for _, attributes in page.elements for key in attributes} <= known | {
        "x1", "x2", "y1", "y2", "class", "aria-hidden"
    }  # fmt: skip
    for name in HOSTILE:
        assert name in page.words
    _check_accessible(page)


def test_tables_are_what_the_result_says(fts: RunResult, tmp_path: Path) -> None:
    other = _fts(strategy=ALONE)
    page = _page(fts, tmp_path, others={"alone": other})
    rows, numbers = page.table("Best value so far of every agent")
    assert rows[0] == ["Agent", "after query 1", "after query 5", "after the last (6)"]
    for row, found, agent in zip(rows[1:], numbers[1:], fts.names, strict=True):
        assert row[0] == agent
        assert found == [float(fts.best(agent)[k]) for k in (0, 4, 5)]
    stack = {
        run_: torch.stack([run_.best(agent) for agent in run_.names])[:, [0, 4, 5]]
        for run_ in (fts, other)
    }
    _, means = page.table("Best value so far: mean")
    for found, values in zip(means[1:], stack.values(), strict=True):
        assert found == pytest.approx(values.mean(dim=0).tolist(), rel=1e-12)
    rows, differences = page.table("Paired differences")
    better = stack[other] - stack[fts]  # smaller is better
    assert differences[1] == pytest.approx(better.mean(dim=0).tolist(), rel=1e-9, abs=1e-15)
    half = 4.302652729911275 * better.std(dim=0) / 3**0.5  # Student's t, two degrees of freedom
    for cell, width in zip(rows[1][1:], half.tolist(), strict=True):
        assert f"± {width:.2g} (3)" in cell


def test_contributions_and_the_budget_are_told(
    fts: RunResult, fts_page: Page, tmp_path: Path
) -> None:
    page = fts_page
    assert "6 evaluations of each agent, initial ones included" in page.words
    rows, _ = page.table("What each agent has sent and received")
    assert rows[0][1:3] == ["Messages sent", "Messages received"]
    for row, found in zip(rows[1:], fts.contributions(), strict=True):
        counts = [found[key] for key in ("messages_sent", "messages_received", "last_replied")]
        assert [row[0], row[1], row[2], row[5]] == [found["site"], *map(str, counts)]
        assert counts == [3, 2, 7]  # after queries 2, 4 and 6, of which the last is too late
    former = replace(fts, rounds=[{**row} for row in fts.rounds], budget=None)
    for row in former.rounds:
        del row["sent"], row["received"]
    page = _page(former, tmp_path)
    assert "not recorded" in page.words
    assert page.table("What each agent has sent and received")[0][1][1] == "—"


def test_intervals_need_two_values_and_cover_as_often_as_they_say() -> None:
    assert report._half_width([1.0]) is None
    draws = generator(0, "intervals").normal(2000, 5)
    hits = sum(abs(float(row.mean())) <= (report._half_width(row.tolist()) or 0) for row in draws)
    assert abs(hits / 2000 - 0.95) < 4.5 * (0.95 * 0.05 / 2000) ** 0.5  # false alarm 7e-6


def test_a_report_is_a_function_of_the_result(seeded: RunResult, tmp_path: Path) -> None:
    pages = []
    for result in (seeded, _de(seeded=True)):
        rounds = [{**row, "cpu_seconds": 0.0} for row in result.rounds]
        pages.append(_page(replace(result, versions={}, rounds=rounds), tmp_path).text)
    assert pages[0] == pages[1]


def test_a_report_of_a_loaded_result_is_the_same(
    tiny: RunResult, tiny_page: Page, tmp_path: Path
) -> None:
    tiny.save(tmp_path / "run")
    loaded = RunResult.load(tmp_path / "run")
    assert _page(loaded, tmp_path).text == tiny_page.text


def test_seeded_noise_is_not_private_in_red(seeded: RunResult, tmp_path: Path) -> None:
    page = _page(seeded, tmp_path)
    (banner,) = [a for a in page.all("p") if "banner" in str(a.get("class"))]
    assert banner["class"] == "banner bad"
    assert "Not private: the noise was seeded." in page.words
    assert "would be (ε, δ)-indistinguishable" in page.words
    assert "The guarantee." not in page.words
    assert "protects no data" in page.words


def test_nothing_of_a_server_is_shown_that_is_not_on_the_list(
    private: RunResult, tmp_path: Path
) -> None:
    said = {**(private.privacy or {}), "secret": "hunter2", "key": [1, 2, "hunter2"]}
    assert "hunter2" not in _page(replace(private, privacy=said), tmp_path).text


def test_bounds_are_rounded_up() -> None:
    assert report._upper(1.99991) == "2"
    assert report._upper(1.0001) == "1.001"
    assert report._upper(1e-5) == "1e-05"
    assert report._upper(0.0) == "0"
    assert report._upper(math.inf) == "inf"


def test_epsilon_release_by_release(private: RunResult) -> None:
    said = private.privacy or {}
    spent = report._spent(private)
    assert [count for count, _ in spent] == [1, 2, 3, 4]
    costs = [epsilon for _, epsilon in spent]
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(said["epsilon"], rel=1e-3)
    mu = gaussian_mu(said["epsilon"], said["delta"])  # everyone takes part: one Gaussian
    assert costs[0] == pytest.approx(gaussian_epsilon(said["delta"], mu / 2), rel=1e-4)
    assert costs[-1] == said["epsilon"]
    assert report._spent(replace(private, price=None)) == []  # of an earlier release's folder
    unlisted = {key: value for key, value in said.items() if key != "paid"}
    assert report._spent(replace(private, privacy=unlisted)) == []
    sampled = _de(sampling=PoissonSampling(0.5))
    assert report._spent(sampled)[-1][1] == (sampled.privacy or {})["epsilon"]


def test_releases_stand_at_their_rounds_where_they_are_told(
    private: RunResult, tmp_path: Path
) -> None:
    told = {**(private.privacy or {}), "release_rounds": [0, 1, 2, 3]}
    page = _page(replace(private, privacy=told), tmp_path)
    assert "after the release of round" in page.words


def test_privacy_against_utility_needs_another_epsilon(
    private: RunResult, looser: RunResult, seeded: RunResult, tmp_path: Path
) -> None:
    assert "Privacy and utility" not in _page(private, tmp_path).titles
    others = {"looser": looser, "seeded": seeded}
    page = _page(private, tmp_path, others=others)
    assert "Privacy and utility" in page.titles
    assert "seeded, seeded noise" in page.words
    elsewhere = replace(looser, privacy={**(looser.privacy or {}), "unit": "record"})
    assert "Privacy and utility" not in _page(private, tmp_path, others={"x": elsewhere}).titles


def test_absences_are_told(tmp_path: Path) -> None:
    result = _fts(absent=lambda name, serial: name == "b" and serial in (3, 4, 6))
    page = _page(result, tmp_path)
    rows, _ = page.table("Agents that did not reply")
    assert rows[1:] == [["b", "3 of 7", "absent: 3–4, 6"]]
    rows, _ = page.table("Best value so far: mean")
    assert rows[0][-1].endswith(" to 6)")
    assert "(2)" in rows[1][2]  # at query 5 only two agents count


def test_points_are_in_own_units(fts_page: Page) -> None:
    page = fts_page
    (label,) = [a["aria-label"] for a in page.all("svg") if "diagonal" in str(a.get("aria-label"))]
    assert label is not None
    assert "rate, depth, kernel" in label
    svg = page.text[page.text.index(html.escape(label)) :]
    ticks = re.findall(r"<text[^>]*>([^<]*)</text>", svg[: svg.index("</figure>")])
    assert {"0.0001", "1", "rbf", "poly", "rate", "depth", "8"} <= set(ticks)


def test_parts_without_data_are_left_out(tiny: RunResult, tmp_path: Path) -> None:
    empty = RunResult(names=("a",), space=SPACE, seed=0, protocol="Mine")
    page = _page(empty, tmp_path)
    assert page.titles == ["Summary", "Who sees what"]
    single = _page(tiny, tmp_path, others={"empty": empty})
    assert "Convergence" in single.titles
    wide = SearchSpace(tuple(Parameter.real(f"x{i}", 0.0, 1.0) for i in range(5)))
    rows = [{"agent": "a", "round": 1, "query": 1, "x": [0.5] * 5, "y": 1.0, "true": None}]
    assert "Evaluated points" not in _page(
        replace(empty, space=wide, records=rows), tmp_path
    ).titles  # fmt: skip


def test_many_agents_are_folded_and_cut(tmp_path: Path) -> None:
    names = tuple(f"agent{n}" for n in range(40))
    rows = [
        {"agent": name, "round": t, "query": t, "x": [0.1, 0.2, 1, 0], "y": float(t), "true": None}
        for name in names
        for t in range(1, 61)
    ]
    result = RunResult(names, SPACE, 0, "FTS", records=rows)
    page = _page(result, tmp_path)
    assert "The first 24 of 40 agents" in page.words
    assert len(page.all("details")) == 1
    assert "One point of 2 is shown" in page.words
    assert len(page.text) < 1_500_000


def test_long_runs_stay_small(tmp_path: Path) -> None:
    rows = [
        {"agent": "a", "round": t, "query": t, "x": [0.1, 0.2, 1, 0], "y": t % 7.0, "true": None}
        for t in range(1, 5001)
    ]
    path = write_report(RunResult(("a",), SPACE, 0, "FTS", records=rows), tmp_path / "report.html")
    assert path.stat().st_size < 1_500_000
    assert report._some_counts(5000, 3) == [1, 2500, 5000]
    assert report._some_counts(3, 3) == [1, 2, 3]


def test_runs_must_go_the_same_way(fts: RunResult, private: RunResult, tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match="the other direction"):
        write_report(fts, tmp_path / "report.html", others={"private": private})
    assert not (tmp_path / "report.html").exists()


def test_own_matplotlib_settings_stay_as_they_were(
    tiny: RunResult, tiny_page: Page, tmp_path: Path
) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"text.color": "red", "font.size": 30.0}):
        page = _page(tiny, tmp_path)
        assert mpl.rcParams["font.size"] == 30.0
    assert page.text == tiny_page.text


@pytest.mark.parametrize("module", ["matplotlib", "matplotlib.style"])
def test_without_matplotlib_the_extra_is_named(
    module: str, tiny: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "botorch_fed\[plot\]"'):
        write_report(tiny, tmp_path / "report.html")
    if module == "matplotlib":
        with pytest.raises(ImportError, match=r'pip install "botorch_fed\[plot\]"'):
            plot_audit(_report(1.0))


# ------------------------------------------------------------------ in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1000,1600",
)


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on PATH")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_browser_shows_it_in_light_and_dark(
    scheme: str, private: RunResult, looser: RunResult, tmp_path: Path
) -> None:
    from PIL import Image

    page = write_report(private, tmp_path / "report.html", others={"looser": looser})
    shot = tmp_path / "shot.png"
    places = [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}"]
    wanted = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    assert BROWSER is not None
    subprocess.run(
        [BROWSER, *QUIET, *places, wanted, page.as_uri()],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    with Image.open(shot) as image:
        counts = image.convert("RGB").getcolors(maxcolors=1 << 24)
    assert counts is not None
    counts.sort(reverse=True)
    paper = {"dark": (0x14, 0x17, 0x1B), "light": (255, 255, 255)}[scheme]
    ink = {"dark": (0xE7, 0xEA, 0xEE), "light": (0x1B, 0x1E, 0x22)}[scheme]
    first = {"dark": (0x4D, 0xB4, 0xF0), "light": (0x00, 0x72, 0xB2)}[scheme]
    colours = {colour: count for count, colour in counts}
    assert counts[0][1] == paper
    assert colours[ink] > 500  # words
    assert colours[first] > 200  # the line of this run
    assert len(colours) > 50


def test_the_hubs_part_has_no_observations_and_says_so(private: RunResult, tmp_path: Path) -> None:
    rounds = [{**row, "cpu_seconds": 0.0} for row in private.rounds]
    page = _page(replace(private, part="hub", records=[], rounds=rounds), tmp_path)
    text = html.unescape(page.text)
    assert "Points and outcomes are at the sites" in text
    assert "every agent's points" not in text
    assert "CPU" not in text  # nobody has measured it
    assert "(ε, δ)-indistinguishable" in page.text
    _check_accessible(page)


def test_a_sites_part_does_not_speak_for_the_run(private: RunResult, tmp_path: Path) -> None:
    own = [row for row in private.records if row["agent"] == private.names[0]]
    part = replace(
        private, part="site", names=private.names[:1], records=own, rounds=[], privacy=None
    )
    page = _page(part, tmp_path)
    text = html.unescape(page.text)
    assert "1 agent<" in text
    assert "The hub's report has the promise" in text
    assert "No privacy guarantee" not in text
    _check_accessible(page)


# ------------------------------------------------------------------ several outcomes

PLATE = (Parameter.real("x", 0.0, 1.0), Parameter.real("y", 0.0, 1.0))
LOSS = Outcome.objective("loss", minimize=True)
SMALL = Outcome.constraint("weight", upper=0.9)


def _plate(X: Tensor) -> Tensor:
    return torch.stack([(X - 0.6).square().sum(dim=-1), X.sum(dim=-1)], dim=-1)


def _of_several(second: Outcome, budget: int = 6) -> RunResult:
    levels = torch.linspace(0.0, 1.0, 11, dtype=torch.float64)
    study = FTS(budget=budget, candidates=torch.cartesian_prod(levels, levels))
    space = SearchSpace(PLATE, outcomes=(LOSS, second))
    return run(study, dict.fromkeys(("a", "b"), _plate), space=space, seed=0, progress=False)


def test_a_bound_is_told_and_kept(tmp_path: Path) -> None:
    result = _of_several(SMALL)
    page = _page(result, tmp_path, others={"shorter": _of_several(SMALL, 4)})
    assert "weight <= 0.9" in page.words
    best = result.best_parameters("a")
    assert f"{best['x']:.6g}" in page.words
    assert "Best trials that meet all constraints" in page.words
    nothing = _of_several(Outcome.constraint("weight", upper=-1.0), 4)
    words = _page(nothing, tmp_path).words
    assert "No trial meets all constraints yet: a, b" in words
    assert "nan" not in words.lower().split()
    with pytest.raises(InputDataError, match="the same outcomes"):
        _page(result, tmp_path, others={"other": nothing})


def test_several_objectives_have_hypervolumes_and_fronts(tmp_path: Path) -> None:
    result = _of_several(Outcome.objective("weight", minimize=True, reference=2.0))
    page = _page(result, tmp_path)
    assert "Hypervolume so far" in page.words
    assert "Best value so far" not in page.words
    assert len(result.pareto("a")) > 1
    for row in result.pareto("a"):
        assert f"{row['parameters']['x']:.6g}" in page.words
