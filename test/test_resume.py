"""Runs of every protocol and channel that are killed somewhere and go on in a new process.

One process for each case forks the runs, which kill themselves by SIGKILL before or after one of
their writes; the test goes on with what they have left.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed import run as module
from botorch_fed.aggregation.secure_sum import CONTEXT
from botorch_fed.engines.inprocess import InProcess
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.base import KeepsSecrets, secrets_in, site_folder, with_stores
from botorch_fed.federation.drive import drive
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import SITE_EVENTS
from botorch_fed.privacy import SharedLedger
from botorch_fed.privacy.distributed import DistributedGaussianSum
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise
from botorch_fed.privacy.mechanisms import GaussianSum
from botorch_fed.run import RunResult, make_agent, run
from botorch_fed.search.region import RegionSearch
from botorch_fed.search.released import Following
from botorch_fed.search.support import SupportSearch
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import TransferSearch
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.log import FileLog
from botorch_fed.storage.store import FileStore, MemoryBlobs
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB
from test.processes import exit_code

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

NAMES = ("ann", "bob", "cem")
SPACE = SearchSpace((Parameter.real("a", 0.0, 1.0), Parameter.real("b", 0.0, 1.0)))
SEEDED = InsecureSeededNoise(7)
REGION = RegionSearch(num_inducing=4, num_candidates=1, wait=1, num_raw=32)
TOGETHER = SupportSearch(
    support_size=4, num_raw=32, num_restarts=2, noise_var=1e-2, models="global"
)
OWN = {"num_raw": 32, "num_restarts": 2, "num_features": 32}


def hill(X: Tensor) -> Tensor:
    return 1 - 6 * (X - 0.3).square().sum(dim=-1, keepdim=True)


def agents_noise(dim: int, num_agents: int) -> DistributedGaussianSum:
    return DistributedGaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=20.0, noise_multiplier=1.0, dropping=1
    )


def servers_noise(dim: int, num_agents: int) -> GaussianSum:
    return GaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=20.0, noise_multiplier=1.0, weight=1.0
    )


def fed_gp(search: Any, channel: Any, **options: Any) -> FedGP:
    common = {"budget": 5, "num_initial": 2, "noise": SEEDED}
    return FedGP(search=search, channel=channel, **{**common, **options})


def dp_fts_de(**options: Any) -> DPFTSDE:
    common = {"budget": 5, "noise_multiplier": 1.0, "releases": (0, 2), "num_initial": 2}
    common |= {"strategy": Following(**OWN, follow=1), "noise": SEEDED}
    return DPFTSDE(**{**common, **options})


def private_ucb(trust: Any, **options: Any) -> PrivateUCB:
    common = {"budget": 4, "noise": SEEDED, "noise_multiplier": None if trust == "none" else 1.0}
    return PrivateUCB(trust=trust, **{**common, **options})


NOISY = {"mechanism": agents_noise, "noise_at": "agent", "sums": 9}
STUDIES: dict[str, Callable[[], Any]] = {
    "fts": lambda: FTS(budget=4),
    "fts published": lambda: FTS(budget=3, every=1, strategy=Strategy(**OWN)),
    "fed-gp plain": lambda: fed_gp(TransferSearch(), "plain"),
    "fed-gp ckks": lambda: fed_gp(TransferSearch(), "ckks"),
    "fed-gp plain, region": lambda: fed_gp(REGION, "plain"),
    "fed-gp ckks, support": lambda: fed_gp(TOGETHER, "ckks"),
    "fed-gp threshold": lambda: fed_gp(TransferSearch(), "threshold"),
    "fed-gp threshold, region": lambda: fed_gp(REGION, "threshold"),
    "fed-gp threshold, agents' noise": lambda: fed_gp(TOGETHER, "threshold", **NOISY),
    "fed-gp plain, server's noise": lambda: fed_gp(
        TOGETHER, "plain", mechanism=servers_noise, noise_at="server"
    ),
    "dp-fts-de": dp_fts_de,
    "dp-fts-de own mean": lambda: dp_fts_de(strategy=TransferSearch(), min_reliability=0.0),
    "private-ucb joint": lambda: private_ucb("joint"),
    "private-ucb local": lambda: private_ucb("local"),
    "private-ucb public": lambda: private_ucb("public", most_per_block=4),
    "private-ucb none": lambda: private_ucb("none"),
    "fed-gp secret noise": lambda: fed_gp(TOGETHER, "threshold", **NOISY, noise=OSNoise()),
    "dp-fts-de secret noise": lambda: dp_fts_de(noise=OSNoise()),
    "private-ucb secret noise": lambda: private_ucb("joint", noise=OSNoise()),
}
SECRET = [name for name in STUDIES if name.endswith("secret noise")]
REPRODUCIBLE = [name for name in STUDIES if name not in SECRET]
FIRST = ("fts", "dp-fts-de own mean", "fed-gp threshold, agents' noise", "private-ucb local")
KILLED = [  # one of each protocol, and the others at night
    pytest.param(name, marks=[] if name in FIRST else [pytest.mark.nightly])
    for name in REPRODUCIBLE
]


def go(case: str, out: Path | None, **options: Any) -> RunResult:
    """The run of a case; one with books has them beside its folder."""
    study = STUDIES[case]()
    with ExitStack() as stack:
        if case.startswith("dp-fts-de") and out is not None:
            books = stack.enter_context(SharedLedger(out.parent / f"{out.name}-books"))
            study = replace(study, shared_ledger=books)
        objectives = dict.fromkeys(NAMES, hill)
        return run(study, objectives, space=SPACE, seed=1, out=out, progress=False, **options)


def mortal(fatal: int) -> Callable[[], int]:
    """Let this process kill itself at its `fatal`-th step; what is returned counts them."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def between(action: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **kwargs: Any) -> Any:
            step()
            result = action(*args, **kwargs)
            step()
            return result

        return both

    for kind, names in (
        (FileStore, ("put", "put_new", "delete")),
        (FileLog, ("append",)),
        (SharedLedger, ("spend",)),
        (module, ("_append", "_write")),
    ):
        for name in names:
            setattr(kind, name, between(getattr(kind, name)))
    return lambda: steps


def forked(work: Callable[[], None]) -> int:
    """How a child ends that does some work."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(case: str, folder: Path, shares: Sequence[float]) -> None:
    """In a process of its own: a whole run, and runs that are killed at shares of its steps."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    reader, writer = os.pipe()

    def whole() -> None:
        count = mortal(0)
        go(case, folder / "whole")
        os.write(writer, str(count()).encode())

    assert forked(whole) == 0
    total = int(os.read(reader, 20))

    def killed(share: float) -> None:
        mortal(max(round(share * total), 1))
        go(case, folder / f"{share}")

    for share in shares:
        assert forked(partial(killed, share)) == -signal.SIGKILL, share


SHARES = (0.02, 0.35, 0.8)  # of the writes of a run


def killed_runs(case: str, folder: Path) -> list[Path]:
    """The folders of runs that were killed."""
    assert exit_code(kill_at, case, folder, SHARES) == 0
    return [folder / f"{share}" for share in SHARES]


def parts(case: str, out: Path) -> Iterator[Site]:
    """What the sites of a finished run have in their folders: as they were left."""
    study = with_stores(STUDIES[case]().dealt_by(1), NAMES, partial(secrets_in, out))
    study.server(SPACE, NAMES)
    for name in NAMES:
        agent, home = make_agent(study, name, SPACE, 1, MemoryBlobs()), site_folder(out, name)
        with Site(name, agent, hill, log=FileLog(home, SITE_EVENTS)) as site:
            yield site


def trace(result: RunResult) -> list[Any]:
    keys = ("agent", "round", "query", "x", "y")
    return [[row[key] for key in keys] for row in result.records]


def check_ledgers(case: str, out: Path, result: RunResult) -> None:
    """Nobody's ledger holds less than what has left, and no release was drawn a second time."""
    said = result.privacy or {}
    if case.startswith("dp-fts-de"):
        with SharedLedger(Path(f"{out}-books")) as books:  # before the noise, so once too much
            assert said["releases"] <= books.releases <= said["releases"] + 1
    for site in parts(case, out):
        state = site.state
        if case in ("fed-gp threshold, agents' noise", "fed-gp secret noise"):
            memory = state.aggregation
            assert memory.ledger.releases == memory.draws == said["sums"]
        if case == "private-ucb local":
            memory = state.aggregation
            assert memory.sent == 4
            assert memory.ledger.releases == 1  # a record is in one increment
        assert len(site.observations()) == len(result.history(site.name)[0])


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(case: str, tmp_path: Path) -> None:
    expected = go(case, None)
    for out in killed_runs(case, tmp_path):
        result = go(case, out, resume=True)
        assert trace(result) == trace(expected)
        assert result.privacy == expected.privacy
        check_ledgers(case, out, result)


@pytest.mark.parametrize("case", SECRET)
def test_a_killed_run_with_secret_noise_pays_for_all_that_left(case: str, tmp_path: Path) -> None:
    whole = go(case, None)
    assert whole.privacy is not None
    for out in killed_runs(case, tmp_path):
        result = go(case, out, resume=True)
        assert result.privacy is not None
        assert result.privacy["private"]
        assert result.privacy["epsilon"] == whole.privacy["epsilon"]
        assert [row["round"] for row in result.records] == [row["round"] for row in whole.records]
        check_ledgers(case, out, result)


# ------------------------------------------------------------------ where secrets lie


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("channel", ["ckks", "threshold"])
def test_keys_lie_at_their_sites_and_nowhere_else(channel: str, tmp_path: Path) -> None:
    go(f"fed-gp {channel}", tmp_path / "run")
    for name in NAMES:
        store = secrets_in(tmp_path / "run", name)
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(store.folder))
        assert store.folder.stat().st_mode & 0o777 == 0o700
        (handle,) = [name for name in store.names() if re.fullmatch("he-[0-9a-f]{40}", name)]
        secret = store.get(handle)
        assert secret is not None
        others = [path for path in files(tmp_path / "run") if path.parent != store.folder]
        found = [path for path in others if secret[-2000:] in path.read_bytes()]
        # One key for all, or everybody's own.
        assert {path.parts[-4] for path in found} <= {"sites"}
        assert len(found) == (2 if channel == "ckks" else 0)
    served = secrets_in(tmp_path / "run", None).names()
    assert served == ([CONTEXT] if channel == "ckks" else [])


def test_sums_without_noise_lie_with_the_server(tmp_path: Path) -> None:
    go("private-ucb joint", tmp_path / "run")
    assert len(secrets_in(tmp_path / "run", None).names()) == 2
    for name in NAMES:
        assert not site_folder(tmp_path / "run", name).joinpath("secrets").exists()


def test_a_lost_key_is_said_and_not_made_anew(tmp_path: Path) -> None:
    out = tmp_path / "run"
    go("fed-gp ckks", out)
    kept = secrets_in(out, "ann").get(CONTEXT)
    shutil.rmtree(out / "server" / "secrets")
    with pytest.raises(ProtocolError, match="provision"):
        go("fed-gp ckks", out, resume=True)
    assert secrets_in(out, "ann").get(CONTEXT) == kept


def test_another_folder_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ProtocolError, match="not empty"):
        go("fed-gp ckks", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# ------------------------------------------------------------------ machines of their own

BY_DAY = ("fts", "fed-gp ckks", "fed-gp threshold", "private-ucb joint", "private-ucb local")
OWN_STORES = [
    pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.nightly])
    for name in REPRODUCIBLE
    if "dp-fts-de" not in name
]


def own(folder: Path, me: str | None) -> Callable[[str | None], FileStore]:
    """The stores of a machine that has its own only."""

    def stores(who: str | None) -> FileStore:
        assert who == me
        return FileStore(folder / (who or "hub"))

    return stores


@pytest.mark.parametrize("case", OWN_STORES)
def test_every_machine_makes_its_own_part(case: str, tmp_path: Path) -> None:
    """A site from the study, the roster and its own store; the server from its own, too."""
    dealt = with_stores(STUDIES[case](), NAMES, lambda who: FileStore(tmp_path / (who or "hub")))
    if isinstance(dealt, KeepsSecrets):
        dealt.provision(SPACE)
        dealt.provision(SPACE)
    sites = []
    for name in NAMES:
        study = with_stores(STUDIES[case]().dealt_by(1), NAMES, own(tmp_path, name))
        sites.append(Site(name, make_agent(study, name, SPACE, 1, MemoryBlobs()), hill))
    hub = with_stores(STUDIES[case]().dealt_by(1), NAMES, own(tmp_path, None))
    server = hub.server(SPACE, NAMES)
    engine = InProcess(sites)
    end = drive(server, engine)
    found = {name: [] for name in NAMES}
    for name, seen in engine.observations():
        found[name].append(seen)
    expected = go(case, None)
    for name in NAMES:
        X, Y = expected.history(name)
        assert torch.equal(torch.cat([seen.X for seen in found[name]]), X)
        assert torch.equal(torch.cat([seen.Y for seen in found[name]]), Y)
    account = getattr(server, "privacy", None)
    assert (None if account is None else account(end)) == expected.privacy


def test_a_part_that_lacks_what_it_needs_says_so(tmp_path: Path) -> None:
    study = with_stores(STUDIES["fed-gp ckks"](), NAMES, own(tmp_path, "ann"))
    with pytest.raises(ProtocolError, match="provision"):
        study.agent("ann", SPACE, 0, MemoryBlobs())
    hub = with_stores(STUDIES["fed-gp ckks"](), NAMES, own(tmp_path, None))
    with pytest.raises(ProtocolError, match="provision"):
        hub.server(SPACE, NAMES)
    with pytest.raises(InputDataError, match="other agents"):
        with_stores(STUDIES["fed-gp plain"](), NAMES, own(tmp_path, None)).server(SPACE, NAMES[:2])


def test_a_key_that_was_half_handed_out_is_made_anew(tmp_path: Path) -> None:
    class Broken(FileStore):
        def put_new(self, name: str, data: bytes) -> None:
            raise OSError("the disk")

    def stores(who: str | None) -> FileStore:
        return (Broken if broken and who == "cem" else FileStore)(tmp_path / (who or "hub"))

    broken = True
    study = with_stores(STUDIES["fed-gp ckks"](), NAMES, stores)
    with pytest.raises(OSError, match="the disk"):
        study.provision(SPACE)
    broken = False
    study.provision(SPACE)
    contexts = {FileStore(tmp_path / name).get(CONTEXT) for name in (*NAMES, "hub")}
    assert len(contexts) == 1
    study.provision(SPACE)
    assert {FileStore(tmp_path / "ann").get(CONTEXT)} == contexts
