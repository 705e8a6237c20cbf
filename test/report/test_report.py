"""Reports and the picture of an audit show what the results say."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

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
from botorch_fed.report.accounts import spent
from botorch_fed.report.page import plotly_script
from botorch_fed.report.verdict import queries_with_messages
from botorch_fed.rng import generator
from botorch_fed.run import Part, RunResult, run
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB
from botorch_fed.test_functions import KernelBandit, SyntheticGPAgents

pytest.importorskip("matplotlib")
go = pytest.importorskip("plotly.graph_objects")


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
    "<a href='javascript:alert(3)'>&lt;b>%{x}",
)
SEPARATED = "line\u2028and\u2029paragraph\ud800</script>"
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
        self.scripts: list[str] = []
        self._caption = ""
        self.feed(self.text)
        self.close()
        assert not self.open, self.open
        self.markup = self.text
        for script in self.scripts:
            self.markup = self.markup.replace(script, "", 1)
        (document,) = [text for text in self.scripts if text.startswith("{")]
        self.charts: dict[str, list[dict[str, Any]]] = json.loads(document)["charts"]

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
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        if self.open and self.open[-1] in ("style", "script"):
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
        return re.findall(r"<h2[^>]*>(.*?)</h2>", self.markup)


def _page(result: RunResult, folder: Path, **options: Any) -> Page:
    path = folder / "report.html"
    assert write_report(result, path, **options) == path
    return Page(path)


def _check_accessible(page: Page) -> None:
    names = [str(a["id"]) for _, a in page.elements if a.get("id")]
    assert len(set(names)) == len(names)
    targets = [str(a["href"]) for _, a in page.elements if "href" in a]
    targets += [f"#{a['for']}" for a in page.all("label")]
    assert {target.removeprefix("#") for target in targets} <= set(names)
    drawn = [a for a in page.all("div") if a.get("class") == "chart"]
    assert {str(a["id"]).removesuffix("-chart") for a in drawn} == set(page.charts)
    assert all(a["role"] == "img" and a["aria-label"] for a in drawn)
    assert all(f"{a['id']}" in names and a.get("id") for a in page.all("select"))
    for one, many in (("table", "caption"), ("figure", "figcaption"), ("section", "h2")):
        assert len(page.all(one)) == len(page.all(many))
    assert len(page.all("h1")) == 1
    assert all("scope" in attributes for attributes in page.all("th"))
    assert page.all("html") == [{"lang": "en"}]


def _check_figures(page: Page) -> None:
    """Plotly's own schema takes every figure, and no text of others is markup for it."""
    for views in page.charts.values():
        for view in views:
            layout = {key: value for key, value in view["layout"].items() if key != "scrollable"}
            for trace in view["data"]:
                tags = re.findall(r"<[^>]*>?", "".join(_words_of(trace)))
                assert set(tags) <= {"<br>", "<extra>", "</extra>"}
            go.Figure({"data": _light(view["data"]), "layout": _light(layout)})


def _words_of(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, list | dict):
        for one in part.values() if isinstance(part, dict) else part:
            yield from _words_of(one)


def _light(part: Any) -> Any:
    """With colours in the place of the style sheet's variables."""
    if isinstance(part, str):
        return "#123456" if part.startswith("var(--") else part
    if isinstance(part, list):
        return [_light(one) for one in part]
    return {key: _light(one) for key, one in part.items()} if isinstance(part, dict) else part


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
    lower = page.markup.lower()
    for word in ("http://", "https://", "src=", "@import", "<link", "file:", "nan", "url("):
        assert word not in lower, word
    assert str(tmp_path) not in page.text
    _check_accessible(page)
    _check_figures(page)


def test_the_policy_allows_the_two_scripts_and_no_other(tiny_page: Page) -> None:
    assert plotly_script() in tiny_page.scripts
    (policy,) = [
        str(a["content"])
        for a in tiny_page.all("meta")
        if a.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules  # only a live page may ask its server
    code = [text for text in tiny_page.scripts if not text.startswith("{")]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    assert rules["script-src"].split() == [f"'sha256-{one}'" for one in hashes]
    assert {key for _, attributes in tiny_page.elements for key in attributes} & {
        "onclick",
        "src",
    } == set()


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
                Parameter.choice(HOSTILE[2], [SEPARATED, HOSTILE[3]]),
            ),
            SPACE.outcome,
        ),
        rounds=[{**row, "replied": False, "failure": HOSTILE[0]} for row in result.rounds],
        privacy={"mechanism": HOSTILE[0], "private": False, "channel": SEPARATED},
        sees=Sees(
            (Row(HOSTILE[0], "server", HOSTILE[1], ("agents",), "data"),),
            trust=HOSTILE[2],
            limits=(HOSTILE[3],),
        ),
    )
    page = _page(strange, tmp_path, title=HOSTILE[1], others={HOSTILE[0]: result})
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {"li"}
    known = {key for _, attributes in plain.elements for key in attributes}
    assert {key for _, attributes in page.elements for key in attributes} <= known
    for name in (*HOSTILE, SEPARATED.replace("\ud800", "?")):
        assert name in page.words
    assert len(page.scripts) == 3
    assert page.scripts[0].isascii()
    assert not set("<>&") & set(page.scripts[0])
    _check_accessible(page)
    _check_figures(page)


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
        (mean, low, high) = (float(end) for end in re.findall(r"-?[\d.]+(?:e-?\d+)?", cell)[:3])
        assert (high - low) / 2 == pytest.approx(width, rel=1e-2)
        assert low <= mean <= high
        assert cell.endswith("(3)")


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
    banners = [a["class"] for a in page.all("p") if "banner" in str(a.get("class"))]
    assert banners.count("banner bad") == 1
    assert "Not private: the noise was seeded." in page.words
    assert "would be (ε, δ)-indistinguishable" in page.words
    assert "The guarantee." not in page.words
    assert "protects no data" in page.words


def test_a_run_that_has_not_ended_promises_what_its_plan_does(
    private: RunResult, fts: RunResult, tmp_path: Path
) -> None:
    words = _page(replace(private, ended=False, privacy=None), tmp_path).words
    assert "The run has not ended. This is what its folder holds: 36 evaluations." in words
    assert "The plan of the run promises ε ≤ 2 and δ = 0.001, per agent" in words
    assert "No privacy guarantee" not in words
    assert "No privacy guarantee" in _page(replace(fts, ended=False), tmp_path).words


def test_nothing_of_a_server_is_shown_that_is_not_on_the_list(
    private: RunResult, tmp_path: Path
) -> None:
    said = {**(private.privacy or {}), "secret": "hunter2", "key": [1, 2, "hunter2"]}
    assert "hunter2" not in _page(replace(private, privacy=said), tmp_path).text


def test_epsilon_release_by_release(private: RunResult) -> None:
    said = private.privacy or {}
    payments = spent(private)
    assert [count for count, _ in payments] == [1, 2, 3, 4]
    costs = [epsilon for _, epsilon in payments]
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(said["epsilon"], rel=1e-3)
    mu = gaussian_mu(said["epsilon"], said["delta"])  # everyone takes part: one Gaussian
    assert costs[0] == pytest.approx(gaussian_epsilon(said["delta"], mu / 2), rel=1e-4)
    assert costs[-1] == said["epsilon"]
    assert spent(replace(private, price=None)) == []  # of an earlier release's folder
    unlisted = {key: value for key, value in said.items() if key != "paid"}
    assert spent(replace(private, privacy=unlisted)) == []
    sampled = _de(sampling=PoissonSampling(0.5))
    assert spent(sampled)[-1][1] == (sampled.privacy or {})["epsilon"]


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


def test_slices_are_in_own_units(fts_page: Page) -> None:
    rate, depth, kernel = fts_page.charts["slices"]
    assert [rate["layout"]["xaxis"][key] for key in ("type", "title")] == ["log", {"text": "rate"}]
    assert rate["layout"]["xaxis"]["range"] == pytest.approx([-4.16, 0.16])
    assert all(1e-4 <= x <= 1 for trace in rate["data"] for x in trace["x"])
    assert {x for trace in depth["data"] for x in trace["x"]} <= set(range(1, 9))
    assert kernel["layout"]["xaxis"]["ticktext"] == ["rbf", "poly"]
    _check_figures(fts_page)


def test_parts_without_data_are_left_out(tiny: RunResult, tmp_path: Path) -> None:
    empty = RunResult(names=("a",), space=SPACE, seed=0, protocol="Mine")
    page = _page(empty, tmp_path)
    assert page.titles == ["Result", "Who sees what", "The run"]
    alone = _page(tiny, tmp_path, others={"empty": empty})
    assert "Convergence" not in alone.titles
    assert "Agent by agent" in alone.titles
    assert "Convergence" in _page(tiny, tmp_path, others={"again": tiny}).titles


def test_many_agents_are_folded_and_cut(tmp_path: Path) -> None:
    names = tuple(f"agent{n}" for n in range(70))
    rows = [
        {"agent": name, "round": t, "query": t, "x": [0.1, 0.2, 1, 0], "y": float(t), "true": None}
        for name in names
        for t in range(1, 61)
    ]
    result = RunResult(names, SPACE, 0, "FTS", records=rows)
    page = _page(result, tmp_path)
    assert "The first 60 of 70 agents" in page.words
    assert "1,400 of 4,200 observations are shown" in page.words
    assert "The last 2,000 of 4,200 trials" in page.words
    assert len(page.text) - len(plotly_script()) < 3_000_000


def test_long_runs_stay_small(tmp_path: Path) -> None:
    rows = [
        {"agent": "a", "round": t, "query": t, "x": [0.1, 0.2, 1, 0], "y": t % 7.0, "true": None}
        for t in range(1, 5001)
    ]
    path = write_report(RunResult(("a",), SPACE, 0, "FTS", records=rows), tmp_path / "report.html")
    assert path.stat().st_size - len(plotly_script()) < 1_500_000


def test_runs_must_go_the_same_way(fts: RunResult, private: RunResult, tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match="the other direction"):
        write_report(fts, tmp_path / "report.html", others={"private": private})
    assert not (tmp_path / "report.html").exists()


def _without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def test_without_plotly_the_extra_is_named(
    tiny: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without("plotly", monkeypatch)
    plotly_script.cache_clear()
    with pytest.raises(ImportError, match=r'plotly: pip install "botorch_fed\[plot\]"'):
        write_report(tiny, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _without("matplotlib", monkeypatch)
    with pytest.raises(ImportError, match=r'matplotlib: pip install "botorch_fed\[plot\]"'):
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
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
)
HARNESS = """<!DOCTYPE html><meta charset="utf-8">
<iframe width="400" height="900" src="report.html">
</iframe><script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, one = (s) => page.querySelector(s);
  const style = (s) => getComputedStyle(one(s));
  const found = {
    width: page.documentElement.scrollWidth,
    drawn: page.querySelectorAll(".chart svg.main-svg:first-of-type").length,
    paper: style("body").backgroundColor,
    words: one("#result").innerText,
  };
  const done = () => document.body.replaceChildren(JSON.stringify(found));
  if (!one("#convergence-chart")) return done();
  found.line = one("#convergence-chart .js-line").style.stroke;
  const [, status] = page.querySelectorAll(".filter select");
  status.value = "failed";
  status.dispatchEvent(new Event("input"));
  found.failed = [...one("table.trials tbody").rows].filter((row) => !row.hidden).length;
  status.value = "";
  status.dispatchEvent(new Event("input"));
  const head = one("table.trials thead").rows[0].cells[3];
  head.querySelector("button").click();
  found.sorted = [...one("table.trials tbody").rows].map((r) => r.cells[3].textContent);
  const pick = one("#agents-pick");
  pick.value = "1";
  pick.dispatchEvent(new Event("change"));
  found.title = one("#agents-chart .xtitle").textContent;
  document.querySelector("iframe").contentWindow.dispatchEvent(new Event("beforeprint"));
  found.printed = one("#convergence-chart .js-line").style.stroke;
  done();
});
</script>"""


def _browsed(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What the harness finds in the report of a folder, and what the browser complains of."""
    (folder / "harness.html").write_text(HARNESS)
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *QUIET, f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom",
         (folder / "harness.html").as_uri()],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    (body,) = re.findall(r"<body>(\{.*\})</body>", done.stdout, flags=re.DOTALL)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(body)), "\n".join(complaints)


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on PATH")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_browser_draws_filters_and_sorts(scheme: str, fts: RunResult, tmp_path: Path) -> None:
    wide = SearchSpace(tuple(Parameter.real(f"{HOSTILE[k % 6]} {k}", 0.0, 1.0) for k in range(9)))
    points = generator(0, "wide").uniform(30, 9)
    rows = [
        {"agent": "abc"[k % 3], "round": 1 + k // 3, "query": 1 + k // 3, "status": "completed",
         "x": x, "y": sum(x[:2]), "true": None}
        for k, x in enumerate(points.tolist())
    ]  # fmt: skip
    other = replace(fts, space=wide, records=rows)
    rows = [dict(row) for row in rows]
    rows[7] |= {"y": None, "status": "failed", "reason": HOSTILE[0]}
    written = _page(replace(other, records=rows), tmp_path, others={HOSTILE[1]: other})
    assert set(written.charts) >= {"importances", "slices", "parallel", "communication"}
    assert len(written.charts["slices"]) == 8
    shade = {"dark": 0, "light": 1}[scheme]
    found, complaints = _browsed(tmp_path, f"--blink-settings=preferredColorScheme={shade}")
    assert not complaints
    assert found["width"] <= 400
    assert found["drawn"] == len(written.charts) > 4
    assert found["paper"] == {"dark": "rgb(20, 23, 27)", "light": "rgb(255, 255, 255)"}[scheme]
    assert found["line"] == {"dark": "rgb(77, 180, 240)", "light": "rgb(0, 114, 178)"}[scheme]
    assert found["printed"] == "rgb(0, 114, 178)"
    assert f"Against {HOSTILE[1]}" in found["words"]
    assert found["failed"] == 1
    values = [float(words) for words in found["sorted"] if words != "–"]
    assert values == sorted(values)
    assert found["sorted"][-1] == "–"
    assert found["title"] == "query of a"


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on PATH")
@pytest.mark.parametrize("name", RUNS)
def test_a_browser_draws_every_kind_of_run(name: str, tmp_path: Path) -> None:
    make, _ = RUNS[name]
    written = _page(make(), tmp_path)
    found, complaints = _browsed(tmp_path)
    assert not complaints
    assert found["width"] <= 400
    assert found["drawn"] == len(written.charts)


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on PATH")
@pytest.mark.parametrize("part", ["hub", "site"])
def test_a_browser_draws_a_part_of_a_run(part: Part, fts: RunResult, tmp_path: Path) -> None:
    name = fts.names[0]
    if part == "site":
        rows, rounds = (
            [row for row in table if row["agent"] == name] for table in (fts.records, fts.rounds)
        )
        result = replace(fts, part=part, names=(name,), records=rows, rounds=rounds)
        result.trust = {name: [0.2, 0.4]}
    else:
        result = replace(fts, part=part, records=[])
    written = _page(result, tmp_path)
    found, complaints = _browsed(tmp_path, "--blink-settings=preferredColorScheme=0")
    assert not complaints
    assert found["width"] <= 400
    assert found["paper"] == "rgb(20, 23, 27)"
    assert found["drawn"] == len(written.charts) > 0
    assert ("not known here" in found["words"]) == (part == "hub")
    assert ("0.40" in found["words"]) == (part == "site")


def test_the_hubs_part_has_no_observations_and_says_so(private: RunResult, tmp_path: Path) -> None:
    rounds = [{**row, "cpu_seconds": 0.0} for row in private.rounds]
    page = _page(replace(private, part="hub", records=[], rounds=rounds), tmp_path)
    text = html.unescape(page.text)
    assert "Points and outcomes are at the sites" in text
    assert ", hub of " in page.text
    assert "Not known here: best configurations, trust" in text
    assert "Trust earnednot known here" in page.words
    assert "Evaluations that failed" not in text
    assert "every agent's points" not in text
    assert "CPU" not in text  # nobody has measured it
    assert "(ε, δ)-indistinguishable" in page.text
    _check_accessible(page)


def test_a_sites_part_does_not_speak_for_the_run(private: RunResult, tmp_path: Path) -> None:
    own = [row for row in private.records if row["agent"] == private.names[0]]
    rounds = [row for row in private.rounds if row["agent"] == private.names[0] and row["replied"]]
    part = replace(
        private, part="site", names=private.names[:1], records=own, rounds=rounds, privacy=None,
        trust={private.names[0]: [0.25]},
    )  # fmt: skip
    page = _page(part, tmp_path)
    text = html.unescape(page.text)
    assert f", site {private.names[0]}<" in text
    assert "Not known here: points and outcomes of other sites" in text
    assert "The hub's report has what was spent" in text
    assert "The plan of the run promises ε" in text
    assert "No privacy guarantee" not in text
    assert "replied to every request" not in text
    assert "Trust earned0.25" in page.words
    assert "Queries that had messages" in page.words
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
    assert "as observed, of those that meet all constraints" in page.words
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


# ------------------------------------------------------------------ the first screen


def _of_values(**values: list[float]) -> RunResult:
    """A run of sites with these values, query by query."""
    rows = [
        {"agent": name, "round": 1 + k // 2, "query": k + 1, "x": [k / 9, 0.2, 1, 0], "y": y,
         "true": None, "status": "completed"}
        for name, found in values.items()
        for k, y in enumerate(found)
    ]  # fmt: skip
    return RunResult(tuple(values), SPACE, 0, "FTS", records=rows)


ALONE_VALUES = {f"s{k}": [1.0 + 0.01 * k, 0.5 + 0.02 * k] for k in range(4)}
SHIFTS = (  # of the best values at the end, smaller is better
    ([-0.2, -0.21, -0.19, -0.2], "good", "This run is ahead.", "better by 0.2 on average"),
    ([0.2, 0.21, 0.19, 0.2], "bad", "This run is behind.", "worse by 0.2 on average"),
    ([0.2, -0.21, 0.19, -0.2], "warn", "No difference is shown.", "so no difference is shown"),
    ([0.0] * 4, "warn", "No difference is shown.", "the same best value at the end"),
)


@pytest.mark.parametrize(("shifts", "kind", "head", "words"), SHIFTS)
def test_the_verdict_is_that_of_paired_intervals(
    shifts: list[float], kind: str, head: str, words: str, tmp_path: Path
) -> None:
    pairs = zip(ALONE_VALUES.items(), shifts, strict=True)
    this = _of_values(**{name: [first, last + shift] for (name, (first, last)), shift in pairs})
    alone = _of_values(**ALONE_VALUES)
    page = _page(this, tmp_path, others={"alone": alone})
    (banner,) = [a for a in page.all("div") if "banner" in str(a.get("class"))]
    assert banner["class"] == f"banner {kind}"
    assert head in page.words
    assert words in page.words
    assert "intervals are over sites, not over seeds" in page.words
    both = _page(this, tmp_path, others={"alone": alone, "itself": this})
    assert ("It depends on the comparison." in both.words) == (kind != "warn")


def test_one_site_or_none_shows_no_difference(tmp_path: Path) -> None:
    this, alone = _of_values(a=[1.0, 0.2]), _of_values(a=[1.0, 0.5])
    assert "One site shows no difference." in _page(this, tmp_path, others={"alone": alone}).words
    other = _of_values(b=[1.0, 0.5])
    assert "no site is in both runs" in _page(this, tmp_path, others={"alone": other}).words
    words = _page(this, tmp_path).words
    assert "The contribution is unknown." in words
    assert "--compare alone=FOLDER" in words


def test_what_several_runs_say_stands_first(tmp_path: Path) -> None:
    this, alone = _of_values(a=[1.0, 0.2]), _of_values(a=[1.0, 0.5])
    findings = ("Ahead of <b>alone</b> over ten seeds.", "Level with Sobol points.")
    page = _page(this, tmp_path, others={"alone": alone}, findings=findings)
    places = [page.words.index(words) for words in (*findings, "One site shows no difference.")]
    assert places == sorted(places)
    assert "one of these runs" in page.words
    assert "Several runs" not in _page(this, tmp_path, others={"alone": alone}).words


def test_best_configurations_have_names_and_all_digits(fts: RunResult, fts_page: Page) -> None:
    rows, _ = fts_page.table("Best configuration of each site")
    assert rows[0] == [
        "Site", "Best value (smaller is better)", "rate", "depth", "kernel", "Queries with messages"
    ]  # fmt: skip
    for row, name in zip(rows[1:], fts.names, strict=True):
        value, best = fts.best_observed(name)
        assert row[:2] == [name, f"{value:.5g}"]
        assert row[2:5] == [f"{best['rate']:.6g}", str(best["depth"]), best["kernel"]]
    (text,) = re.findall(r"<pre[^>]*>(.*?)</pre>", fts_page.markup, flags=re.DOTALL)
    listed = json.loads(html.unescape(text))
    assert [one["parameters"] for one in listed] == [fts.best_parameters(n) for n in fts.names]


def test_queries_had_messages_from_the_first_one_on(fts: RunResult, tmp_path: Path) -> None:
    found = queries_with_messages(fts)
    assert found == dict.fromkeys(fts.names, (4, 6))  # messages after queries 2 and 4
    silent = replace(fts, rounds=[{**row, "received": []} for row in fts.rounds])
    assert queries_with_messages(silent) == dict.fromkeys(fts.names, (0, 6))
    assert queries_with_messages(replace(fts, rounds=[])) is None
    trusted = replace(fts, trust={"a": [0.1, 0.5], "c": [0.7]})
    rows, _ = _page(trusted, tmp_path).table("Best configuration of each site")
    assert [row[-1] for row in rows] == ["Trust", "0.50", "–", "0.70"]
    assert "Trust earned0.600.50 to 0.70 at the sites" in _page(trusted, tmp_path).words
