"""Study files: what they mean, and what is said of the ones that mean nothing."""

from __future__ import annotations

import itertools
import math
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from botorch_fed.acquisition import Constant, InverseSquare, MixingSchedule, Polynomial
from botorch_fed.models import (
    FeatureMap,
    InducingFeatures,
    QuadratureFourierFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    WarpedFeatures,
    sobol_support,
)
from botorch_fed.privacy import DistributedGaussianSum, GaussianSum
from botorch_fed.rng import generator
from botorch_fed.run import RunResult
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Fidelity, Outcome, Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB, default_feature_map, default_kernel
from botorch_fed.study import (
    ObjectiveError,
    StudyError,
    StudyFile,
    plan,
    read_study,
    run_study,
    simple_settings,
)

NUMBERS = itertools.count()  # a module is imported once a process: every test has its own
OBJECTIVE = """
import math
def score(agent, *, lr, depth, kind):
    shift = {"north": 0.0, "south": 0.5}[agent]
    return 0.9 - 0.05 * (math.log10(lr) - shift) ** 2 - 0.01 * depth + 0.02 * (kind == "rbf")
def broken(agent, **point):
    raise ValueError("no licence")
def wordy(agent, **point):
    return "much"
def lost(agent, **point):
    return float("nan")
def several(agent, *, lr, depth, kind):
    return {"gain": -abs(lr - 1), "error": depth / 8, "latency": 3.0 * depth, "energy": 1.0}
def forgetful(agent, **point):
    return {"gain": 1.0}
def short(agent, **point):
    return 0.5
def vague(agent, **point):
    return {"gain": 1.0, "error": "low", "latency": 1.0, "energy": 1.0}
number = 3
"""
STUDY = """objective = "MODULE:score"
agents = ["north", "south"]
budget = 2
seed = 1

[space]
lr = { type = "real", lower = 1e-3, upper = 1e3, log = true }
depth = { type = "integer", lower = 1, upper = 8 }
kind = { type = "choice", values = ["rbf", "linear"] }

[outcome]
centre = 0.9
scale = 0.1

[protocol]
name = "fts"
every = 1

[protocol.strategy]
num_raw = 32
num_restarts = 2
num_features = 32
"""
WITH_STARTS = STUDY.replace("budget = 2", "budget = 4")
PRIVATE = WITH_STARTS.replace('"fts"\nevery = 1', '"dp-fts-de"\nnum_initial = 2\nreleases = [0]')
PRIVACY = "\n[privacy]\nepsilon = 200.0\ndelta = 1e-3\n"  # two agents: less would be all noise
SUMS = (
    'channel = "plain"\n'
    + WITH_STARTS.split("[protocol]")[0]
    + """[protocol]
name = "fed-gp"
num_initial = 2

[protocol.mechanism]
MECHANISM

[protocol.search]
kind = "support"
support_size = 4
num_raw = 16
"""
)
BANDIT = STUDY.split("[protocol]")[0] + '[protocol]\nname = "private-ucb"\n' + PRIVACY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))  # a study adds its folder
    return tmp_path


def write(folder: Path, text: str = STUDY) -> Path:
    module = f"objective_of_a_test_{next(NUMBERS)}"
    (folder / f"{module}.py").write_text(OBJECTIVE)
    path = folder / "study.toml"
    path.write_text(text.replace("MODULE", module))
    return path


def read(folder: Path, text: str = STUDY) -> StudyFile:
    return read_study(write(folder, text))


# ------------------------------------------------------------------ what a file means


def test_a_file_means_what_it_says(folder: Path) -> None:
    study = read(folder, 'out = "runs/a"\nworkers = 2\n' + STUDY)
    assert study.space.parameters == (
        Parameter.real("lr", 1e-3, 1e3, scale="log"),
        Parameter.integer("depth", 1, 8),
        Parameter.choice("kind", ["rbf", "linear"]),
    )
    assert study.space.outcome == Outcome(0.9, 0.1)
    assert (study.agents, study.budget, study.seed) == (("north", "south"), 2, 1)
    assert (study.out, study.workers, study.privacy) == (folder / "runs/a", 2, None)
    made = study.study()
    assert isinstance(made, FTS)
    assert (made.budget, made.every, made.strategy.num_raw) == (2, 1, 32)


def test_a_budget_becomes_noise_and_what_agents_insist_on(folder: Path) -> None:
    made = read(folder, PRIVATE + PRIVACY + "\n").study()
    assert isinstance(made, DPFTSDE)
    assert (made.epsilon, made.delta, made.releases) == (200.0, 1e-3, (0,))
    assert made.require is not None
    assert made.require.epsilon == 200.0
    bandit = read(folder, BANDIT).study()
    assert isinstance(bandit, PrivateUCB)
    assert bandit.epsilon == 200.0


def test_nested_settings(folder: Path) -> None:
    text = STUDY.replace('"fts"\nevery = 1', '"fed-gp"\nnum_initial = 1').replace(
        ".strategy]", '.search]\nkind = "support"\nsupport_size = 8'
    )
    text = 'channel = "plain"\n' + text.replace("num_features = 32\n", "")
    made = read(folder, text).study()
    assert isinstance(made, FedGP)
    assert made.channel == "plain"
    assert made.search.support_size == 8  # type: ignore[union-attr]
    text = PRIVATE.replace("releases = [0]", "sampling_rate = 0.5") + PRIVACY
    assert read(folder, text).settings["sampling"].rate == 0.5


FED_GP = 'channel = "plain"\n' + STUDY.split("[protocol]")[0] + '[protocol]\nname = "fed-gp"\n'
FED_GP = FED_GP.replace("budget = 2", "budget = 5")


def test_searches_of_fed_gp(folder: Path) -> None:
    made = read(folder, FED_GP).study()
    assert made.search == TransferSearch()
    written = "[protocol.search]\nwarp = false\n"
    basis = "[protocol.feature_map]\nkind = 'rff'\nnum_features = 20\n"
    made = read(folder, FED_GP + written + basis).study()
    assert made.search == TransferSearch(warp=False)
    assert made.feature_map.num_features == 20
    lengthscale = made.feature_map.kernel.lengthscale
    assert lengthscale[0] == pytest.approx(0.25 * len(lengthscale) ** 0.5)
    longer = FED_GP.replace("budget = 5", "budget = 6")
    study = read(folder, longer + '[protocol.search]\nkind = "region"\nnum_inducing = 4\n')
    assert study.study().search == RegionSearch(num_inducing=4)
    assert plan(study).rounds == 2  # after four initial points
    found = plan(read(folder, FED_GP))
    assert (found.budget, found.rounds, found.total) == (5, 2, 10)
    assert "mean function of its own model" in str(found.sees)
    assert "106 numbers" in str(found.sees)


@pytest.mark.parametrize(
    ("written", "schedule"),
    [
        ('"inverse-square"', InverseSquare()),
        ('{ kind = "inverse-square" }', InverseSquare()),
        ('{ kind = "polynomial", c = 0.5 }', Polynomial(0.5)),
        ('{ kind = "constant", p = 1 }', Constant(1.0)),
    ],
)
@pytest.mark.parametrize("text", [STUDY, PRIVATE + PRIVACY])
def test_schedules(folder: Path, text: str, written: str, schedule: MixingSchedule) -> None:
    text = text.replace("num_raw = 32", f"num_raw = 32\nschedule = {written}")
    assert read(folder, text).study().strategy.schedule == schedule


MAPS: list[tuple[str, Callable[[StationaryKernel], FeatureMap]]] = [
    (
        'kind = "rff"\nnum_features = 20',
        lambda k: RandomFourierFeatures.draw(k, 20, generator=generator(0, "features")),
    ),
    (
        'kind = "qff"\ntol = 0.1',
        lambda k: QuadratureFourierFeatures.from_kernel(
            k, torch.tensor([[0.0] * 4, [1.0] * 4]).double(), tol=0.1
        ),
    ),
    ('kind = "inducing"\nnum_features = 6', lambda k: InducingFeatures(k, sobol_support(4, 6))),
]


@pytest.mark.parametrize(("written", "make"), MAPS)
def test_feature_maps(
    folder: Path, written: str, make: Callable[[StationaryKernel], FeatureMap]
) -> None:
    table = f"\n[protocol.feature_map]\n{written}\nlengthscale = 2\noutputscale = 0.5\n"
    study = read(folder, STUDY + table)
    expected = make(StationaryKernel(math.inf, [2.0] * 4, 0.5))
    assert study.study().feature_map.fingerprint == expected.fingerprint
    result = run_study(study, out=None, progress=False)
    assert len(result.records) == 4


def test_a_feature_map_has_the_kernel_and_the_scales_of_the_file(folder: Path) -> None:
    table = '\n[protocol.feature_map]\nkind = "rff"\nkernel = "matern32"\n'
    table += "lengthscale = [0.1, 0.2, 0.3, 0.4]\n"
    phi = read(folder, PRIVATE + PRIVACY + table).study().feature_map
    assert (phi.kernel.nu, phi.lengthscale.tolist()) == (1.5, [0.1, 0.2, 0.3, 0.4])
    linear = STUDY.replace(", log = true", "")  # six decades on a linear scale: seen as a logarithm
    phi = read(folder, linear + table).study().feature_map
    assert isinstance(phi, WarpedFeatures)
    assert (phi.offsets > 0).tolist() == [True, False, False, False]
    short = default_kernel(4).lengthscale
    phi = read(folder, STUDY + '\n[protocol.feature_map]\nkind = "rff"\n').study().feature_map
    assert torch.equal(phi.lengthscale, short)
    assert torch.equal(phi.frequencies, default_feature_map(phi_space(folder)).frequencies)


def phi_space(folder: Path) -> SearchSpace:
    return read(folder).space


def test_candidates_by_number_and_by_file(folder: Path) -> None:
    study = read(folder, STUDY.replace("every = 1", "every = 1\ncandidates = 50"))
    points = study.study().candidates
    assert torch.equal(points, study.space.snap(points))
    assert 40 < len(points) <= 50
    (folder / "points.csv").write_text(
        "depth,kind,lr\n1,rbf,0.1\n2,linear,1e-2\n3,rbf,100\n3,rbf,100\n"
    )
    text = STUDY.replace("every = 1", 'every = 1\ncandidates = "points.csv"')
    listed = read(folder, text)
    assert listed.space.from_unit(listed.study().candidates) == [
        {"lr": pytest.approx(0.1), "depth": 1, "kind": "rbf"},
        {"lr": pytest.approx(0.01), "depth": 2, "kind": "linear"},
        {"lr": pytest.approx(100), "depth": 3, "kind": "rbf"},
    ]
    result = run_study(listed, out=None, progress=False)
    allowed = listed.study().candidates.tolist()
    assert all(row["x"] in allowed for row in result.records)
    (folder / "points.csv").write_text("depth,kind,lr\n1,rbf,0.1\n2,linear,1e-2\n")
    assert read(folder, text).fingerprint != listed.fingerprint  # sites must have the same list


@pytest.mark.parametrize(
    "text",
    [
        STUDY.replace("every = 1", "every = 1\ninitial_design = 2"),
        SUMS.replace("num_initial", "initial_design").replace(
            "[protocol.mechanism]\nMECHANISM", ""
        ),
    ],
    ids=["fts", "fed-gp"],
)
def test_sites_begin_with_public_points(folder: Path, text: str) -> None:
    study = read(folder, text)
    design = study.study().initial_design
    assert set(design) == set(study.agents)
    result = run_study(study, out=None, progress=False)
    for agent in study.agents:
        assert torch.equal(result.history(agent)[0][:2], design[agent])
    with pytest.raises(StudyError, match="initial_design: expected an integer from 1 on, got 0"):
        read(folder, text.replace("initial_design = 2", "initial_design = 0"))


PLAIN = STUDY.split("\n[protocol.strategy]")[0] + "\n"
DEFAULT = 'default = { lr = 1, depth = 3, kind = "rbf" }\n'


@pytest.mark.parametrize("text", [PLAIN, FED_GP], ids=["fts", "fed-gp"])
def test_sites_begin_with_the_default(folder: Path, text: str) -> None:
    study = read(folder, text + DEFAULT)
    expected = {"lr": 1.0, "depth": 3, "kind": "rbf"}
    assert study.study().default == expected
    result = run_study(study, out=None, progress=False)
    for agent in study.agents:
        assert study.space.from_unit(result.history(agent)[0][:1])[0] == pytest.approx(expected)
    other = read(folder, text + DEFAULT.replace("3", "4"))
    assert other.fingerprint != study.fingerprint


@pytest.mark.parametrize("text", [PLAIN, FED_GP], ids=["fts", "fed-gp"])
def test_by_default_sites_hear_of_each_other_in_every_round(folder: Path, text: str) -> None:
    written = text.replace("budget = 5", "budget = 8")
    written = written.replace("budget = 2", "budget = 5").replace("every = 1\n", "")
    result = run_study(read(folder, written), out=None, progress=False)
    sent = [row["round"] for row in result.rounds if row["bytes_up"] > 800]  # a hundred weights
    assert len(sent) == 2 * (3 if text == PLAIN else 5)  # from three observations on
    received = {row["round"] for row in result.rounds if row["bytes_down"] > 800}
    assert max(sent) in received


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("default = 3", "default: expected a table, got 3"),
        ("default = { lr = 1, depth = 3 }", "default.kind: missing; expected a string"),
        ('default = { lr = 1, depht = 3, kind = "rbf" }', "Did you mean 'depth'"),
        (
            DEFAULT.replace("3", "9"),
            r"default.depth: Parameter 'depth' must lie in \[1, 8\], got 9",
        ),
        (DEFAULT.replace("3", "1.5"), "default.depth: expected an integer, got 1.5"),
        (DEFAULT.replace("rbf", "poly"), "default.kind: .*must be one of"),
        (DEFAULT + "initial_design = 2", "default: does not go with initial_design"),
        (DEFAULT + "[protocol.strategy]\nprior_until = 0", "default: .*published search"),
    ],
)
def test_defaults_that_fit_not(folder: Path, written: str, said: str) -> None:
    with pytest.raises(StudyError, match=said):
        read(folder, f"{PLAIN}{written}\n")
    with pytest.raises(StudyError, match="default: does not go with a published search"):
        read(folder, f'{FED_GP}{DEFAULT}[protocol.search]\nkind = "region"\n')


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ("lr,depth\n1,1\n", "begin it with lr,depth,kind"),
        ("lr,depth,kind\n", "one point at least"),
        ("lr,depth,kind\n1,1,rbf\n1e9,1,rbf\n", r"points.csv, point 2 .*must lie in"),
        ("lr,depth,kind\n1,1,red\n", "point 1 .*must be one of"),
        ("lr,depth,kind\n1,1.5,rbf\n", "point 1 .*must be an integer"),
        ("lr,depth,kind\n1,much,rbf\n", "point 1 .*could not convert"),
        ("lr,depth,kind\n1,1\n", "point 1 .*another number of columns"),
        ("lr,depth,kind\n1,1,rbf,2\n", "point 1 .*another number of columns"),
    ],
)
def test_candidates_that_do_not_fit(folder: Path, points: str, said: str) -> None:
    (folder / "points.csv").write_text(points)
    with pytest.raises(StudyError, match=rf"study\.toml:17: protocol\.candidates: .*{said}"):
        read(folder, STUDY.replace("every = 1", 'candidates = "points.csv"'))


MECHANISMS = [
    ('kind = "gaussian"\nclip_norm = 50.0', GaussianSum, "server", "zero-out"),
    (
        'kind = "distributed-gaussian"\nclip_norm = 50.0\ncolluding = 0\nadjacency = "replace-one"',
        DistributedGaussianSum,
        "agent",
        "replace-one",
    ),
]


@pytest.mark.parametrize(("written", "kind", "noise_at", "adjacency"), MECHANISMS)
def test_a_budget_of_fed_gp(
    folder: Path, written: str, kind: type, noise_at: str, adjacency: str
) -> None:
    study = read(folder, SUMS.replace("MECHANISM", written) + PRIVACY)
    made = study.study()
    assert isinstance(made, FedGP)
    assert (made.noise_at, made.delta, made.require) == (noise_at, 1e-3, study.privacy)
    found = plan(study)
    assert found.price is not None
    assert 180 < found.price.epsilon <= 200  # what [privacy] allows, and not much less
    assert (found.price.adjacency, found.price.delta) == (adjacency, 1e-3)
    assert "noise" in str(found.sees)
    mechanism = made.make_aggregation().mechanism_for(made.terms(study.space, study.agents))
    assert isinstance(mechanism, kind)
    assert mechanism.clip_norm == 50.0
    result = run_study(study, out=None, progress=False)
    assert result.privacy is not None
    assert result.privacy["private"]
    assert pickle.loads(pickle.dumps(made.mechanism)) == made.mechanism  # for worker processes


SUM_MISTAKES = [
    ('kind = "gaussian"', PRIVACY, 20, "mechanism.clip_norm: missing; expected a number"),
    ('kind = "gausian"\nclip_norm = 1.0', PRIVACY, 21, "Did you mean 'gaussian'"),
    ('kind = "gaussian"\nclip_norm = 1.0\ndropping = 1', PRIVACY, 23, "unknown key"),
    (
        'kind = "gaussian"\nclip_norm = 1.0\nnoise_multiplier = 1.0',
        PRIVACY,
        23,
        r"follows from \[privacy\]: leave it out",
    ),
    ('kind = "gaussian"\nclip_norm = 1.0', "", 20, "noise_multiplier: missing; expected a number"),
    ('kind = "gaussian"\nclip_norm = -1.0', PRIVACY, 20, "mechanism: A clip norm must"),
    (
        'kind = "distributed-gaussian"\nclip_norm = 1.0\ncolluding = 2',
        PRIVACY,
        20,
        "mechanism: Of 2 agents 2 may collude .*nobody is left",
    ),
]


@pytest.mark.parametrize(("written", "budget", "line", "said"), SUM_MISTAKES)
def test_a_mechanism_that_makes_no_sense(
    folder: Path, written: str, budget: str, line: int, said: str
) -> None:
    with pytest.raises(StudyError, match=rf"study\.toml:{line}: .*{said}"):
        read(folder, SUMS.replace("MECHANISM", written) + budget)


def test_what_fed_gp_needs_for_a_budget(folder: Path) -> None:
    written = 'kind = "gaussian"\nclip_norm = 50.0'
    with pytest.raises(StudyError, match=r"privacy: fed-gp adds no noise without a mechanism"):
        read(folder, SUMS.split("[protocol.mechanism]")[0] + PRIVACY)
    region = SUMS.replace('"support"\nsupport_size', '"region"\nnum_inducing')
    with pytest.raises(
        StudyError, match=r'mechanism.kind: noise in every round would exceed .*kind = "support"'
    ):
        read(folder, region.replace("MECHANISM", written) + PRIVACY)
    sealed = SUMS.replace('"plain"', '"threshold"')
    with pytest.raises(StudyError, match=r'study\.toml:21: .*has to read .*channel = "plain" at'):
        read(folder, sealed.replace("MECHANISM", written) + PRIVACY)
    noisy = SUMS.replace("MECHANISM", written + "\nnoise_multiplier = 0.4")
    found = plan(read(folder, noisy))  # noise, and no budget that anybody insists on
    assert found.price is not None
    with pytest.raises(StudyError, match=r"feature_map: this search makes its own basis"):
        read(folder, noisy.replace("num_initial = 2", "feature_map = { kind = 'rff' }"))


def test_identities_are_a_table(folder: Path) -> None:
    agents = read(folder, FED_GP).agents
    keys = [
        f"{name} = {place:064x}".replace("= ", '= "') + '"' for place, name in enumerate(agents)
    ]
    table = "\n[identities]\n" + "\n".join(keys) + "\n"
    joint = FED_GP.replace('channel = "plain"', 'channel = "threshold"')
    study = read(folder, joint + table)
    made = study.study().make_aggregation()
    assert dict(made.identities) == {name: f"{i:064x}" for i, name in enumerate(agents)}
    assert study.fingerprint != read(folder, joint).fingerprint
    for text, words in (
        (FED_GP + table, r'identities are for channel="threshold"'),
        (joint + table.replace(keys[1], ""), r"identities.*missing"),
        (joint + table.replace(keys[1], keys[1] + '\nzoe = "00"'), "unknown key"),
        (joint + table.replace("0000", "zz00"), "64 digits"),
        (joint + table.replace(keys[1], keys[1].replace("1", "0")), "one key twice"),
    ):
        with pytest.raises(StudyError, match=words):
            read(folder, text)


def test_every_simple_setting_of_every_study_is_known() -> None:
    assert {"every", "message", "q", "noise_var", "active"} <= set(simple_settings(FTS))
    assert {"trust", "batch", "psd", "inflate"} <= set(simple_settings(PrivateUCB))
    assert not {"feature_map", "noise", "candidates", "_made"} & set(simple_settings(FedGP))


def test_an_objective_is_called_by_agent_and_keywords(folder: Path) -> None:
    study = read(folder)
    objective = study.objectives()["south"]
    X = study.space.to_unit([{"lr": 10**0.5, "depth": 1, "kind": "rbf"}])
    torch.testing.assert_close(objective(X), torch.tensor([[0.91]]).double())
    again = pickle.loads(pickle.dumps(objective))  # for worker processes
    torch.testing.assert_close(again(X), objective(X))


@pytest.mark.parametrize(
    ("name", "said", "most"),
    [
        ("broken", "ValueError: no licence", 10),
        ("wordy", "must return a finite number|must return a number, got str", 3),
        ("lost", "must return a finite number, got nan", 10),
    ],
)
def test_an_objective_that_fails(folder: Path, name: str, said: str, most: int) -> None:
    study = read(folder, STUDY.replace(":score", f":{name}"))
    result = run_study(study, out=None, progress=False)
    north, south = result.failures()
    assert (north["site"], north["failed"], north["evaluations"]) == ("north", 2, 2)
    assert re.search(said, " ".join(north["reasons"]))
    assert south["failed"] == 2
    text = STUDY.replace(":score", f":{name}").replace("budget = 2", f"budget = {most}")
    longer = read(folder, text)
    with pytest.raises(ObjectiveError, match=f"'north' has failed at its first {most} .*({said})"):
        run_study(longer, out=None, progress=False)


# ------------------------------------------------------------------ what is refused

# What is replaced, by what, the line of the complaint, and what it says.
MISTAKES = [
    ("budget = 2", "bugdet = 2", 3, "unknown key. Did you mean 'budget'"),
    ("budget = 2", 'budget = "2"', 3, "budget: expected an integer, got '2'. Write e.g. budget ="),
    ("budget = 2", "budget = 0", 3, "expected an integer from 1 on, got 0"),
    ("budget = 2", "budget = true", 3, "expected an integer, got true"),
    ("budget = 2", "", 1, "budget: missing; expected an integer. Write e.g. budget = 12"),
    ("budget = 2", "budget = 2 2", 3, "not valid TOML"),
    ("MODULE:score", "MODULE.score", 1, 'expected "package.module:function"'),
    ('["north", "south"]', '["north", "north"]', 2, "agents: expected different names"),
    ('["north", "south"]', "[1, 2]", 2, "expected a list, each item a string"),
    ("upper = 1e3, log", "upper = 1e-9, log", 7, "lower bound of 'lr' must lie below the upper"),
    ("lower = 1e-3,", "lower = 0,", 7, "log scale needs positive bounds"),
    ("log = true", "logg = true", 7, "space.lr.logg: unknown key. Did you mean 'log'"),
    ("lower = 1, upper = 8", "lower = 1.5, upper = 8", 8, "space.depth.lower: expected an integer"),
    ('"integer"', '"int"', 8, "expected one of .*got 'int'. Did you mean 'integer'"),
    ('["rbf", "linear"]', '["rbf"]', 9, "needs at least two different values"),
    ("kind =", "agent =", 9, "a parameter is a keyword of the objective"),
    ("scale = 0.1", "scale = 0.0", 11, "positive scale"),
    ("centre = 0.9", "center = 0.9", 12, "unknown key. Write centre"),
    ('"fts"', '"ftz"', 16, "protocol.name: expected one of .*Did you mean 'fts'"),
    ("every = 1", "evry = 1", 17, "protocol.evry: unknown key. Did you mean 'every'"),
    ("every = 1", 'every = "1"', 17, "expected an integer, got '1'. Write e.g. every = 4"),
    ("every = 1", "every = -1", 15, "every counts rounds from 0"),
    ("every = 1", "epsilon = 2.0", 17, r"protocol.epsilon: belongs in \[privacy\]"),
    ("every = 1", "budget = 2", 17, "belongs at the top of the file"),
    ("every = 1", "rounds = 2", 17, "is now budget, at the top of the file"),
    ("every = 1", "num_initial = 3", 15, "budget = 2 has no room for 3 initial points: write"),
    ("every = 1", "noise = 1", 17, "unknown key"),
    ("every = 1", "data = 1", 17, "cannot be written in a file"),
    (
        "every = 1",
        "feature_map = 1",
        17,
        r"expected a table, got 1. Write \[protocol.feature_map\]",
    ),
    ("every = 1", 'feature_map = { kind = "rfff" }', 17, "feature_map.kind: .*Did you mean 'rff'"),
    ("every = 1", "feature_map = {}", 17, "feature_map.kind: missing; expected one of"),
    ("every = 1", 'feature_map = { kind = "qff", num_features = 9 }', 17, "num_features: unknown"),
    ("every = 1", 'feature_map = { kind = "rff", num_features = 9 }', 17, "must be even"),
    (
        "every = 1",
        'feature_map = { kind = "rff", lengthscale = [0.1] }',
        17,
        "a list of 4, one per",
    ),
    ("every = 1", 'feature_map = { kind = "rff", lengthscale = 0 }', 17, "[Ll]ength ?scale"),
    ("every = 1", 'feature_map = { kind = "rff", kernel = "rbf" }', 17, 'expected one of "se"'),
    ("every = 1", "candidates = 0", 17, "protocol.candidates: .*1..2"),
    ("every = 1", "candidates = 0.5", 17, "expected an integer or a string, got 0.5"),
    ("every = 1", 'candidates = "nowhere.csv"', 17, "nowhere.csv cannot be read .*lr,depth,kind"),
    ("every = 1", 'mechanism = { kind = "gaussian" }', 17, r"fts makes its own: write \[privacy\]"),
    ("num_raw = 32", "num_raw = 1", 19, "num_restarts must lie between 1 and num_raw"),
    ("num_raw = 32", "num_row = 32", 20, "Did you mean 'num_raw'"),
    ("num_raw = 32", "schedule = 0.5", 20, 'strategy.schedule: expected "inverse-square" or a'),
    ("num_raw = 32", 'schedule = "inverse"', 20, "schedule.kind: .*mean 'inverse-square'"),
    ("num_raw = 32", 'schedule = "polynomial"', 20, "schedule.c: missing; expected a number"),
    ("num_raw = 32", 'schedule = { kind = "constant", c = 1.0 }', 20, "schedule.c: unknown key"),
    ("num_raw = 32", 'schedule = { kind = "polynomial", c = -1.0 }', 20, "must be positive"),
    ("num_raw = 32", 'schedule = { kind = "constant", p = 0.0 }', 19, r"must lie in \(0, 1\]"),
    ("seed = 1", 'seed = 1\nchannel = "plain"', 5, "fts sends its messages in the clear"),
    (
        "[outcome]",
        "[privacy]\nepsilon = 1.0\ndelta = 1e-5\n[outcome]",
        11,
        "can keep no privacy budget",
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "said"), MISTAKES)
def test_a_mistake_is_told_with_line_key_and_fix(
    folder: Path, old: str, new: str, line: int, said: str
) -> None:
    assert old in STUDY
    with pytest.raises(StudyError, match=rf"study\.toml:{line}: .*{said}"):
        read(folder, STUDY.replace(old, new, 1))


FORMER = STUDY.replace("budget = 2", "rounds = 2")
OLD_PRIVACY = PRIVACY.replace("[privacy]", "[budget]")


@pytest.mark.parametrize(
    ("text", "line", "budget"),
    [
        (FORMER, 3, "2"),
        (FORMER.replace("every = 1", "every = 1\nq = 3"), 3, "6"),
        (FED_GP.replace("budget = 5", "rounds = 2"), 4, "5"),
        (FED_GP.replace("budget = 5", "rounds = 2") + "initial_design = 4\n", 4, "6"),
        (
            SUMS.replace("budget = 4", "rounds = 2").replace("MECHANISM", 'kind = "gaussian"'),
            4,
            "4",
        ),
        (PRIVATE.replace("budget = 4", "rounds = 2"), 3, "4"),
        (PRIVATE.replace("budget = 4", "rounds = 2") + OLD_PRIVACY, 3, "4"),
        (BANDIT.replace("budget = 2", "rounds = 3").replace(PRIVACY, OLD_PRIVACY), 3, "3"),
        (BANDIT.replace("budget = 2", "rounds = 3").replace('ucb"', 'ucb"\nbatch = 1'), 3, "2"),
    ],
)
def test_a_file_of_an_earlier_release_says_what_to_change(
    folder: Path, text: str, line: int, budget: str
) -> None:
    with pytest.raises(StudyError) as caught:
        read(folder, text)
    said = str(caught.value)
    assert f"study.toml:{line}: rounds: rounds is now budget, evaluations per site" in said
    assert f"with the initial ones: write budget = {budget}." in said
    assert ("[budget] is now [privacy]: write [privacy]." in said) == ("[budget]" in text)
    assert "\n" not in said


def test_a_table_of_an_earlier_release_says_what_to_change(folder: Path) -> None:
    with pytest.raises(StudyError, match=r"\[budget\] is now \[privacy\]: write \[privacy\]"):
        read(folder, PRIVATE.replace("budget = 4\n", "") + OLD_PRIVACY)


PRIVATE_MISTAKES = [
    ("", 1, "privacy: missing; dp-fts-de needs a privacy budget"),
    (PRIVACY.replace("200.0", "-1.0"), 26, "privacy.epsilon: expected a positive number, got -1.0"),
    (PRIVACY.replace("1e-3", "1.5"), 27, r"privacy.delta: expected a number in \(0, 1\)"),
    (PRIVACY.replace("delta", "dleta"), 27, "Did you mean 'delta'"),
    (PRIVACY.replace("delta = 1e-3", ""), 25, "privacy.delta: missing; expected a number"),
    (PRIVACY + "[ledger]\nepsilon = 1.0\ndelta = 1e-3\n", 28, "ledger.path: missing"),
]


@pytest.mark.parametrize(("budget", "line", "said"), PRIVATE_MISTAKES)
def test_a_budget_that_makes_no_sense(folder: Path, budget: str, line: int, said: str) -> None:
    with pytest.raises(StudyError, match=rf"study\.toml:{line}: .*{said}"):
        read(folder, PRIVATE + budget)


def test_a_budget_that_the_noise_cannot_keep(folder: Path) -> None:
    noisy = PRIVATE.replace("num_initial = 2", "noise_multiplier = 0.4\nnum_initial = 2")
    budget = PRIVACY.replace("200.0", "2.0")
    said = r"27: privacy.epsilon: epsilon = 2 cannot be kept: .* Write noise_multiplier = ([\d.]+)"
    with pytest.raises(StudyError, match=said) as caught:
        read(folder, noisy + budget)
    needed = str(caught.value).split("noise_multiplier = ")[2].split()[0]
    fixed = noisy.replace("noise_multiplier = 0.4", f"noise_multiplier = {needed}")
    with pytest.warns(match="times as much signal as noise"):
        assert read(folder, fixed + budget).study().noise_multiplier == float(needed)


def test_what_does_not_go_with_a_budget(folder: Path) -> None:
    with pytest.raises(StudyError, match=r"protocol\.delta: belongs in \[privacy\]"):
        read(folder, PRIVATE.replace("num_initial", "delta = 0.1\nnum_initial") + PRIVACY)
    with pytest.raises(StudyError, match="without noise has no guarantee"):
        read(folder, BANDIT.replace('-ucb"', '-ucb"\ntrust = "none"'))


def test_objectives_that_are_not_there(folder: Path) -> None:
    for wrong, said in (
        ("nowhere_at_all:score", "there is no module 'nowhere_at_all'"),
        ("MODULE:skore", "has no 'skore'"),
        ("MODULE:number", "is no function"),
    ):
        study = read(folder, STUDY.replace("MODULE:score", wrong))
        with pytest.raises(StudyError, match=rf"study\.toml:1: objective: .*{said}.*score\(agent"):
            study.load()


def test_files_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(StudyError, match=r"missing\.toml: cannot be read"):
        read_study(folder / "missing.toml")
    path = folder / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StudyError, match="expected text in UTF-8"):
        read_study(path)


def test_lines_of_sub_tables_and_dotted_keys(folder: Path) -> None:
    table = "[space.lr]\ntype = 'real'\nlower = 3.0\nupper = 'x'\n[outcome]"
    text = STUDY.replace('lr = { type = "real", lower = 1e-3, upper = 1e3, log = true }\n', "")
    with pytest.raises(StudyError, match=r"study\.toml:13: space.lr.upper: expected a number"):
        read(folder, text.replace("[outcome]", table))
    text = STUDY.split("\n[protocol.strategy]")[0].replace("every = 1", "strategy.num_raw = 0.5")
    with pytest.raises(StudyError, match=r"study\.toml:17: protocol.strategy.num_raw: expected"):
        read(folder, text)


# ------------------------------------------------------------------ plans and runs


def test_a_plan_evaluates_nothing_and_says_what_will_happen(folder: Path) -> None:
    study = read(folder, STUDY.replace(":score", ":broken"))
    found = plan(study)
    assert (found.budget, found.rounds, found.total) == (2, 2, 4)
    assert (found.agents, found.columns, found.price) == (2, 4, None)
    assert "There is no privacy guarantee." in found.sees.sentences
    assert found.bytes_per_round is not None
    result = run_study(read(folder), out=None, progress=False)
    counts = result.bytes_per_round()
    # The measurement has other values, but messages of the same size.
    assert list(found.bytes_per_round) == pytest.approx(
        [counts[t] for t in sorted(counts)], rel=0.1
    )


def test_plans_of_private_runs(folder: Path) -> None:
    found = plan(read(folder, PRIVATE + PRIVACY))
    assert found.price is not None
    assert 0 < found.price.epsilon <= 200
    assert (found.budget, found.rounds, found.total) == (4, 2, 8)
    bandit = plan(read(folder, BANDIT.replace('-ucb"', '-ucb"\ntrust = "local"\nbatch = 1')))
    assert (bandit.budget, bandit.rounds, bandit.total) == (2, 4, 4)
    assert bandit.sees.trust.startswith("No party is trusted")
    many = ", ".join(f'"a{n}"' for n in range(21))
    found = plan(read(folder, STUDY.replace('"north", "south"', many)))
    assert found.bytes_per_round is None
    assert "grow with the number of agents" in found.bytes_note


SHARED = PRIVATE.replace('"dp-fts-de"', '"dp-fts-de"\ntrust = "distributed"') + PRIVACY


@pytest.mark.parametrize("channel", [None, "plain", "ckks"])
def test_noise_without_a_trusted_server(folder: Path, channel: str | None) -> None:
    text = SHARED if channel is None else f'channel = "{channel}"\n{SHARED}'
    study = read(folder, text)
    made = study.study()
    assert isinstance(made, DPFTSDE)
    assert (made.trust, made.channel, made.epsilon, made.delta) == (
        "distributed",
        channel,
        200.0,
        1e-3,
    )
    found = plan(study)
    assert found.price is not None
    assert found.price.paid_at == "site"
    assert found.price.mechanism == "DistributedGaussianSum"
    assert 190 < found.price.epsilon <= 200
    assert "agents add the noise" in found.sees.trust
    result = run_study(study, out=folder / "run", progress=False)
    assert result.privacy is not None
    assert result.privacy["sums"] == result.privacy["releases"] == 1
    assert result.privacy["epsilon"] == found.price.epsilon
    assert len(result.records) == 8


def test_the_parts_of_noise_without_a_trusted_server(folder: Path) -> None:
    """A search and an aggregation by name: the same as the study that has one."""
    parts = """[protocol]
name = "federation"
num_initial = 2
[protocol.search]
kind = "botorch_fed.search.released:ReleaseSearch"
[protocol.search.strategy]
num_raw = 32
num_restarts = 2
num_features = 32
[protocol.aggregation]
kind = "botorch_fed.aggregation.secure_sum:SecureSum"
channel = "plain"
epsilon = 200.0
delta = 1e-3
releases = [0]
"""
    made = read(folder, WITH_STARTS.split("[protocol]")[0] + parts)
    named = read(folder, 'channel = "plain"\n' + SHARED)
    one, other = plan(made), plan(named)
    assert one.price is not None
    assert other.price is not None
    assert one.price.guarantee == other.price.guarantee  # of another basis: other noise
    assert one.sees.trust == other.sees.trust


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('channel = "plain"\n' + PRIVATE + PRIVACY, 26, "a trusted server reads every message"),
        (SHARED.replace("[0]", "[0]\nsampling_rate = 0.5"), 27, "nobody knows who is in it"),
        (SHARED.replace("[0]", "[0]\nnum_regions = 2"), 27, "weighs each message by its agent"),
        (SHARED.replace('"distributed"', '"nobody"'), 17, 'one of "central", "distributed"'),
        (
            SHARED + '[ledger]\npath = "books"\nepsilon = 250.0\ndelta = 1e-3\n',
            29,
            "ledger: .* each site adds the noise and pays from its own log",
        ),
        ('channel = "post"\n' + SHARED, 1, 'expected one of "plain", "ckks", "threshold"'),
    ],
)
def test_settings_of_the_other_trust(folder: Path, text: str, line: int, said: str) -> None:
    with pytest.raises(StudyError, match=rf"study\.toml:{line}: .*{said}"):
        read(folder, text)


@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
def test_noise_of_agents_that_cannot_keep_a_budget_says_how_much_does(folder: Path) -> None:
    text = SHARED.replace("num_initial = 2", "noise_multiplier = 0.4\nnum_initial = 2")
    text = text.replace("200.0", "2.0")
    with pytest.raises(StudyError, match="cannot be kept") as caught:
        read(folder, text)
    needed = str(caught.value).split("noise_multiplier = ")[2].split()[0]
    assert read(folder, text.replace("= 0.4", f"= {needed}")).study().epsilon is None


@pytest.mark.parametrize("channel", ["plain", "ckks", "threshold"])
def test_channels(folder: Path, channel: str) -> None:
    text = f'channel = "{channel}"\n' + STUDY.replace('"fts"\nevery = 1', '"fed-gp"')
    text = text.replace("budget = 2", "budget = 5")
    text = text.split("[protocol.strategy]")[0]
    study = read(folder, text)
    result = run_study(study, out=folder / "run", progress=False)
    assert len(result.records) == 2 * (3 + 2)
    if channel == "ckks":
        with pytest.raises(StudyError, match="single key of ckks is not kept"):
            run_study(study, out=folder / "run", resume=True, progress=False)
    else:
        again = run_study(study, out=folder / "run", resume=True, progress=False)
        assert again.records == result.records


def test_a_private_bandit_goes_on_where_it_was(folder: Path) -> None:
    path = write(folder, BANDIT.replace("budget = 2", "budget = 3"))
    module = next(folder.glob("objective_*.py"))
    module.write_text(
        OBJECTIVE.replace(
            "    shift =",
            "    from pathlib import Path\n"
            "    calls = Path(__file__).parent / 'calls'\n"
            "    calls.write_text(calls.read_text() + agent[0] if calls.exists() else agent[0])\n"
            "    if calls.read_text() == 'nsn':\n        raise OSError('power cut')\n    shift =",
        )
    )
    study = read_study(path)
    with pytest.raises(OSError, match="power cut"):
        run_study(study, out=folder / "run", progress=False, raise_errors=True)
    result = run_study(study, out=folder / "run", resume=True, progress=False)
    assert len(result.records) == 6
    assert (folder / "calls").read_text() == "nsn" + "nsns"  # the failed one again, no other
    assert RunResult.load(folder / "run").records == result.records


@pytest.mark.parametrize(("delta", "why"), [("0.9", "above 0.1"), ("0.0999", None)])
def test_a_delta_that_says_nothing_is_refused_with_its_line(
    folder: Path, delta: str, why: str | None
) -> None:
    text = PRIVATE + PRIVACY.replace("1e-3", delta)
    if why is None:
        assert read(folder, text).privacy.delta == 0.0999
        return
    with pytest.raises(StudyError, match=f"delta.*{why}.*1e-05"):
        read(folder, text)


# ------------------------------------------------------------------ constraints and values

RICH = STUDY.replace(
    'kind = { type = "choice", values = ["rbf", "linear"] }',
    'kind = { type = "choice", values = ["rbf", "linear"] }\n'
    'size = { type = "choice", values = [16, 32, 64], log = true }\n'
    'flag = { type = "choice", values = [true, false] }\n'
    'level = { type = "choice", values = ["low", "mid"], ordered = true }\n'
    'folds = { type = "fixed", value = 5 }\n'
    'constraints = ["depth + size / 8 <= 9"]\n'
    'feasible = "MODULE:fits"',
).replace(":score", ":rich")
CHECK = """
def fits(point):
    return point["depth"] != 3
def rich(agent, *, size, flag, level, folds, depth, **point):
    assert (type(size), type(flag), type(level), folds) == (int, bool, str, 5)
    assert depth + size / 8 <= 9 and depth != 3
    return score(agent, depth=depth, **point)
"""


def rich(folder: Path, text: str = RICH) -> StudyFile:
    path = write(folder, text)
    (module,) = folder.glob("objective_of_a_test_*.py")
    module.write_text(OBJECTIVE + CHECK)
    return read_study(path)


def test_constraints_of_a_file_hold(folder: Path) -> None:
    study = rich(folder, RICH.replace("budget = 2", "budget = 6"))
    assert study.space.constraint_words[0] == "depth + 0.125 * size <= 9"
    assert plan(study).constraints == study.space.constraint_words
    assert not any(name.startswith("objective_of_a_test") and folder.name in str(
        getattr(module, "__file__", "")
    ) for name, module in sys.modules.items())  # fmt: skip
    study.find()
    result = run_study(study, out=None, progress=False, raise_errors=True)
    assert len(result.records) == 12
    assert pickle.loads(pickle.dumps(study)).space.fingerprint == study.space.fingerprint


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("depth + size / 8 <= 9", "dept + size <= 9", r":1\d: space.constraints: .*Did you mean"),
        ("depth + size / 8 <= 9", "depth <= 0", r"space.constraints: .*met nowhere"),
        ('"MODULE:fits"', '"fits"', r"space.feasible: expected .package.module:function"),
        ("[16, 32, 64]", '[16, "a"]', r"space.size.values: expected a list"),
        ("value = 5", "values = 5", r"space.folds.*unknown key. Did you mean 'value'"),
        ("every = 1", "every = 1\ninitial_design = 2", "does not go with feasible"),
    ],
)
def test_conditions_that_mean_nothing_are_refused(
    folder: Path, old: str, new: str, match: str
) -> None:
    with pytest.raises(StudyError, match=match):
        rich(folder, RICH.replace(old, new))


def test_a_check_that_is_not_there_belongs_to_the_plan(folder: Path) -> None:
    study = rich(folder, RICH.replace("MODULE:fits", "MODULE:fitting"))
    with pytest.raises(StudyError, match=r"space.feasible: .*has no 'fitting'.*feasible\(point"):
        study.find()


def test_an_infeasible_default_of_a_file_is_refused(folder: Path) -> None:
    text = RICH.split("[protocol.strategy]")[0] + (
        'default = { lr = 1.0, depth = 8, kind = "rbf", size = 32, flag = true, level = "low" }\n'
    )
    with pytest.raises(StudyError, match=r"protocol.default: .*violates depth \+ 0.125"):
        rich(folder, text)


def test_candidates_of_a_file_meet_its_constraints(folder: Path) -> None:
    study = rich(folder, RICH.replace("every = 1", "every = 1\ncandidates = 40"))
    points = study.space.from_unit(study.settings["candidates"])
    assert len(points) > 20
    assert all(p["depth"] + p["size"] / 8 <= 9 for p in points)  # type: ignore[operator]


# ------------------------------------------------------------------ several outcomes

SEVERAL = (
    STUDY.replace("[outcome]\ncentre = 0.9\nscale = 0.1\n", """[outcomes]
error = { minimize = true, reference = 1.0 }
gain = {}
latency = { upper = 20.0 }
energy = { role = "tracking" }
""")
    .split("[protocol.strategy]")[0]
    .replace("MODULE:score", "MODULE:several")
    .replace("budget = 2", "budget = 4")
)  # fmt: skip


def test_a_study_with_several_outcomes_runs(folder: Path) -> None:
    study = read(folder, SEVERAL)
    assert [one.words for one in study.space.metrics] == [
        "minimise error", "maximise gain", "latency <= 20", "energy is recorded"
    ]  # fmt: skip
    assert study.space.metrics[0].reference == 1.0
    outline = plan(study)
    assert outline.outcomes[2] == "latency <= 20"
    assert outline.bytes_per_round is not None
    result = run_study(study, out=None, progress=False)
    assert len(result.history("north")[1][0]) == 4
    front = result.pareto("north")
    assert front
    assert all(row["values"]["latency"] <= 20 for row in front)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("[outcomes]", "[outcome]\ncentre = 1.0\n[outcomes]", r"\[outcome\] for one outcome, or"),
        ("error = {", "error = { scale = 1.0, ", "unknown key.*Expected one of: lower, minimize"),
        ("upper = 20.0", "upper = 'much'", "expected a number, got 'much'.*upper = 20.0"),
        ("gain = {}", "gain = { upper = 1.0, lower = 2.0 }", "lower must lie below upper"),
        ('"tracking"', '"watching"', "watching"),
        ("error = { minimize = true, reference = 1.0 }\ngain = {}\n", "", "Expected an objective"),
    ],
)
def test_outcomes_that_do_not_fit_are_refused(folder: Path, old: str, new: str, match: str) -> None:
    assert old in SEVERAL
    with pytest.raises(StudyError, match=match):
        read(folder, SEVERAL.replace(old, new))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("forgetful", r"must return a dict with \['error', 'gain', .*got \['gain'\]"),
        ("short", "must return a dict with .*got float"),
        ("vague", "must return a number for 'error', got str"),
    ],
)
def test_an_objective_says_all_outcomes(folder: Path, name: str, match: str) -> None:
    study = read(folder, SEVERAL.replace(":several", f":{name}"))
    with pytest.raises(ObjectiveError, match=match):
        run_study(study, out=None, progress=False, raise_errors=True)


# ------------------------------------------------------------------ a fidelity

CURVES = STUDY.replace(
    'kind = { type = "choice", values = ["rbf", "linear"] }',
    'kind = { type = "choice", values = ["rbf", "linear"] }\n'
    'epochs = { type = "integer", lower = 1, upper = 9 }\n'
    'fidelity = { parameter = "epochs", fixed = 1 }',
).replace(":score", ":curve")
STOPPED = """
def curve(agent, *, epochs, **point):
    return {at: score(agent, **point) - 1 / at for at in {1, epochs}}
"""


def curves(folder: Path, text: str) -> StudyFile:
    path = write(folder, text.split("[protocol.strategy]")[0])
    (module,) = folder.glob("objective_of_a_test_*.py")
    module.write_text(OBJECTIVE + STOPPED)
    return read_study(path)


def test_a_file_has_a_fidelity_and_its_objective_returns_curves(folder: Path) -> None:
    study = curves(folder, CURVES.replace("budget = 2", "budget = 3"))
    assert study.space.fidelity == Fidelity("epochs", 1.0)
    assert plan(study).columns == study.space.dim
    result = run_study(study, out=None, progress=False, raise_errors=True)
    for name in result.names:
        X, _ = result.history(name)
        assert 3 - 2 / 10 <= sum(study.space.costs(X)) <= 3 + 1e-9
        assert result.best_parameters(name)["epochs"] == 9
    assert any("curve" in row for row in result.records)


def test_candidates_of_a_file_are_at_several_fidelities(folder: Path) -> None:
    study = curves(folder, CURVES.replace("every = 1", "every = 1\ncandidates = 10"))
    points = study.space.from_unit(study.settings["candidates"])
    assert {point["epochs"] for point in points} == {1, 2, 9}


def test_a_design_of_a_file_is_at_the_target(folder: Path) -> None:
    study = curves(folder, CURVES.replace("every = 1", "every = 1\ninitial_design = 2"))
    designs = study.settings["initial_design"].values()
    assert all(p["epochs"] == 9 for design in designs for p in study.space.from_unit(design))


def test_a_default_of_a_file_needs_no_fidelity(folder: Path) -> None:
    line = 'default = { lr = 1.0, depth = 8, kind = "rbf" }'
    study = curves(folder, CURVES.replace("every = 1", f"every = 1\n{line}"))
    assert study.settings["default"] == {"lr": 1.0, "depth": 8, "kind": "rbf"}


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('"epochs", fixed', '"epoch", fixed', r"space.fidelity: .*'epoch' is no parameter"),
        ("fixed = 1", "fixed = -1", r"space.fidelity: .*fixed cost >= 0"),
        ("fixed = 1", "costs = 1", r"space.fidelity.costs.*unknown key"),
    ],
)
def test_fidelities_that_mean_nothing_are_refused(
    folder: Path, old: str, new: str, match: str
) -> None:
    with pytest.raises(StudyError, match=match):
        curves(folder, CURVES.replace(old, new))


def test_the_seed_of_a_file_deals_first_points_in_one_process_and_across_machines(
    folder: Path,
) -> None:
    assert read(folder, STUDY.replace("seed = 1", "seed = 3")).study().design_seed == 3
    assert read(folder, STUDY.replace("seed = 1", "seed = 0")).study().design_seed is None
    fixed = STUDY.replace("every = 1", "every = 1\ndesign_seed = 5")
    assert read(folder, fixed).study().design_seed == 5
