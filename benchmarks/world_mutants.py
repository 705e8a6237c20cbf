"""Further deliberate defects, of mechanisms, accountants and whole protocols, and audits of worlds.

    with installed(mutant):
        failures = failures_of(case)
    assert failures

`CASES` are mechanisms with which a defect makes a difference: bounds other than one, centres other
than zero, rosters whose last agent counts, and sums so wide that tails are seen. `PROTOCOLS` are
whole runs, see `botorch_fed.audits`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import privacy_mutants as known
from benchmarks.privacy_mutants import Mutant
from botorch_fed.audits import SUBJECTS, audit_protocol, protocol_checks
from botorch_fed.privacy.audit import audit
from botorch_fed.privacy.distributed import DistributedGaussianSum
from botorch_fed.privacy.evidence import AuditReport, Check
from botorch_fed.privacy.mechanisms import (
    FixedSizeSampling,
    GaussianSum,
    PoissonSampling,
    SignalWarning,
    WeightedGaussianSum,
)
from botorch_fed.privacy.world_checks import world_checks
from botorch_fed.privacy.worlds import subject_of

ROUNDS = 2
_SCALED: dict[str, Any] = {"num_agents": 6, "dim": 4, "clip_norm": 3.0}

CASES: dict[str, Callable[[], Any]] = {
    **known.CASES,
    **known.DISTRIBUTED_CASES,
    **{name: case.make for name, case in known.STREAM_CASES.items() if case.within is None},
    "plain, bound 3": lambda: GaussianSum(noise_multiplier=1.5, **_SCALED),
    "plain, bound 3, sampled": lambda: GaussianSum(
        noise_multiplier=1.5, sampling=PoissonSampling(0.5), **_SCALED
    ),
    "plain, bound 3, two of six": lambda: GaussianSum(
        noise_multiplier=1.5,
        sampling=FixedSizeSampling(2),
        adjacency="replace-one",
        **_SCALED,
    ),
    "weighted, bound 3": lambda: WeightedGaussianSum(
        weights=known._weights(), noise_multiplier=1.5, **_SCALED
    ),
    "plain, wide": lambda: GaussianSum(num_agents=2, dim=4096, clip_norm=1.0, noise_multiplier=1.0),
    "agents, wide": lambda: DistributedGaussianSum(
        num_agents=2, dim=4608, clip_norm=1.0, noise_multiplier=1.0
    ),
}


def checked(case: str, *, seed: int = 0, draws: int = 24) -> tuple[Check, ...]:
    """The checks of worlds alone: cheap, and of all mechanisms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)
        subject = subject_of(CASES[case](), ROUNDS)
    return world_checks(subject, seed=seed, draws=draws)


def failures_of(case: str, *, seed: int = 0) -> list[str]:
    """What fails; of an audit that cannot even be made, the exception."""
    return [check.name for check in checked(case, seed=seed) if not check.passed]


def audited(case: str, *, seed: int = 0, runs: int = 300) -> AuditReport:
    """The whole audit of a case; all worlds with the first seed, for chance is not in them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)
        mechanism = CASES[case]()
    return audit(mechanism, rounds=ROUNDS, runs=runs, seed=seed, every=12 if seed else 1)


# ------------------------------------------------------------------ the list

_MODULE = "botorch_fed.privacy.mechanisms"
_SUMS = f"{_MODULE}:GaussianMechanism"
_SHARES = "botorch_fed.privacy.distributed:DistributedMechanism"
_RECORDS = "botorch_fed.privacy.records:RecordStatistic"
_ACCOUNTING = "botorch_fed.privacy.accounting"
_NOISED = known._NOISED
_CLIPPED = known._CLIPPED
_SAMPLE = known._SAMPLE
_SHARE = known._SHARE
_PAY = "ledger = pay(self, ledger, private=noise.private)"
_DRAWS = "draws = normal(noise, *x.shape, path=path).mul_(std / step).round_()"
_OUTCOME = "y = (records[:, -1:] - self.centre).clamp(-self.outcome_bound, self.outcome_bound)"
_EVERY_SUM = ("plain, bound 3", "weighted, bound 3", "correlated")

# The first of the cases is the one that the fast tests take.
LISTED = (
    Mutant(
        "vectors that overflow are not clipped",
        f"{_MODULE}:_clip_factors",
        "rows = clip(torch.from_numpy(rows), norm).numpy()",
        "return rows * 1e-300, np.ones(len(rows))",
        _EVERY_SUM,
    ),
    Mutant(
        "the last agent is not clipped",
        f"{_SUMS}._clipped_sum",
        _CLIPPED,
        f"{_CLIPPED}; factors = np.where(np.arange(self.num_agents)[agents] == "
        "self.num_agents - 1, 1.0, factors)",
        _EVERY_SUM,
    ),
    Mutant(
        "divided by the realised sample",
        f"{_SUMS}.release",
        "total = self._clipped_sum(chunks, sampled) / self.sampling_rate",
        "total = self._clipped_sum(chunks, sampled) / (float(sampled.double().mean()) or 1.0)",
        ("plain, bound 3, sampled", "weighted, sampled", "correlated, sampled"),
    ),
    Mutant(
        "neighbours share a coin",
        f"{_SUMS}.release",
        _SAMPLE,
        f"{_SAMPLE}; sampled[1::2] = sampled[0 : self.num_agents // 2 * 2 : 2]",
        ("plain, bound 3, sampled", "weighted, sampled", "correlated, sampled"),
    ),
    Mutant(
        "noise cut at 3 deviations",
        "botorch_fed.privacy.hazmat.noise:lattice_gaussian",
        _DRAWS,
        _DRAWS.replace("path=path)", "path=path).clamp_(-3, 3)"),
        ("plain, wide",),
    ),
    Mutant(
        "off the lattice",
        "botorch_fed.privacy.hazmat.noise:lattice_gaussian",
        _DRAWS,
        _DRAWS.replace(".round_()", ""),
        ("plain, bound 3", "weighted, bound 3", "local", "blocks"),
    ),
    Mutant(
        "an exceeded budget is ignored",
        f"{_ACCOUNTING}:Ledger.spend",
        "if self.budget is not None and not _covers(self.budget, after, event):",
        "if False:",
        ("plain, bound 3", "agents", "records", "tree", "local", "blocks"),
    ),
    Mutant(
        "half noise when several contribute",
        f"{_SUMS}.release",
        _NOISED,
        _NOISED.replace(
            "self.noise_scale",
            "self.noise_scale / (2 if float(total.norm()) > 1.2 * self.sensitivity else 1)",
        ),
        ("plain, bound 3", "weighted, bound 3"),
    ),
    Mutant(
        "participations in quadrature",
        "botorch_fed.privacy.tree:PrefixSum._norm",
        "return self.participations * (distance + rounding) * (1 + _SLACK)",
        "return math.sqrt(self.participations) * (distance + rounding) * (1 + _SLACK)",
        ("root, two records",),
    ),
    Mutant(
        "discrete noise cut at 4 deviations",
        f"{_SHARES}.share_of_noise",
        _SHARE,
        f"{_SHARE}.clamp(-int(4 * std), int(4 * std))",
        ("agents, wide",),
    ),
    Mutant(
        "records are clipped before they are centred",
        f"{_RECORDS}.statistics",
        _OUTCOME,
        "y = records[:, -1:].clamp(-self.outcome_bound, self.outcome_bound) - self.centre",
        ("local, zero-out", "tree, zero-out", "local", "root"),
    ),
    Mutant(
        "outcomes are clipped before they are centred",
        "botorch_fed.privacy.increments:BlockSum.add",
        "clipped = (values - state.centre).clamp(-state.outcome_bound, state.outcome_bound)",
        "clipped = values.clamp(-state.outcome_bound, state.outcome_bound) - state.centre",
        ("blocks, zero-out", "blocks"),
    ),
    Mutant(
        "discrete noise under replace-one is not charged",
        f"{_ACCOUNTING}:_google_rdp_epsilon",
        "inner = dp.GaussianDpEvent(event.noise_multiplier / (2 if replaced else 1))",
        "inner = dp.GaussianDpEvent(event.noise_multiplier)",
        ("agents, replace-one", "records, replace-one"),
    ),
)

OWN = (
    Mutant(
        "half the sensitivity",
        f"{_SUMS}.sensitivity",
        "return self._largest_column * self.clip_norm / self.sampling_rate",
        "return self._largest_column * self.clip_norm / self.sampling_rate / 2",
        _EVERY_SUM,
    ),
    Mutant(
        "noise does not grow with the bound",
        f"{_SUMS}.sensitivity",
        "return self._largest_column * self.clip_norm / self.sampling_rate",
        "return self._largest_column / self.sampling_rate",
        ("plain, bound 3", "weighted, bound 3"),
    ),
    Mutant(
        "noise of the rate forgotten",
        f"{_SUMS}.sensitivity",
        "return self._largest_column * self.clip_norm / self.sampling_rate",
        "return self._largest_column * self.clip_norm",
        ("plain, bound 3, sampled", "weighted, sampled"),
    ),
    Mutant(
        "the variance as the deviation",
        f"{_SUMS}.release",
        _NOISED,
        _NOISED.replace("self.noise_scale", "self.noise_scale**2"),
        ("plain, bound 3", "weighted, bound 3"),
    ),
    Mutant(
        "the deviation as the variance",
        f"{_SUMS}.release",
        _NOISED,
        _NOISED.replace("self.noise_scale", "(2 * self.noise_scale) ** 0.5"),
        ("plain, bound 3",),
    ),
    Mutant(
        "sampled twice",
        f"{_SUMS}.release",
        _SAMPLE,
        f"{_SAMPLE} & self.sampling.draw(self.num_agents, noise=noise, path=(*path, 'again'))",
        ("plain, bound 3, sampled", "weighted, sampled", "correlated, sampled"),
    ),
    Mutant(
        "everybody is sampled who has data",
        f"{_SUMS}.release",
        _SAMPLE,
        f"{_SAMPLE} | True",
        ("plain, bound 3, sampled", "weighted, sampled", "correlated, sampled"),
    ),
    Mutant(
        "samples of a fixed size are always the same",
        "botorch_fed.privacy.hazmat.noise:subset",
        "chosen[keys.topk(size, largest=False).indices] = True",
        "chosen[:size] = True",
        ("plain, bound 3, two of six",),
    ),
    Mutant(
        "each coordinate is clipped by itself",
        f"{_SUMS}._clipped_sum",
        _CLIPPED,
        "factors = np.ones(len(rows)); rows = np.clip(rows, -self.clip_norm, self.clip_norm)",
        _EVERY_SUM,
    ),
    Mutant(
        "noise from the seed of the run",
        f"{_SUMS}.release",
        _NOISED,
        _NOISED.replace("noise=noise", "noise=InsecureSeededNoise(0)"),
        _EVERY_SUM,
    ),
    Mutant(
        "paid after the release",
        f"{_SUMS}.release",
        _PAY,
        "account = ledger",
        _EVERY_SUM,
        (
            (
                "return Release(values, self.noise_std, noise.private, repr(self)), ledger",
                "return Release(values, self.noise_std, noise.private, repr(self)), "
                "pay(self, account, private=noise.private)",
            ),
        ),
    ),
    Mutant(
        "an increment is paid after it was drawn",
        "botorch_fed.privacy.increments:LocalGaussian.release",
        _PAY,
        "account = ledger",
        ("local",),
        (
            (
                "return Release(values[None], std, noise.private, repr(self)), ledger",
                "return Release(values[None], std, noise.private, repr(self)), "
                "pay(self, account, private=noise.private)",
            ),
        ),
    ),
    Mutant(
        "not paid at all",
        "botorch_fed.privacy.aggregation:PrivateSum._paid",
        "return pay(self.mechanism, ledger, private=noise.private)",
        "return ledger",
        ("agents", "records"),
    ),
    Mutant(
        "seeded noise is called secret",
        "botorch_fed.privacy.paying:pay",
        "return ledger.spend(mechanism.event, note=type(mechanism).__name__, private=private)",
        "return ledger.spend(mechanism.event, note=type(mechanism).__name__, private=True)",
        ("plain, bound 3", "agents", "root", "local", "blocks"),
    ),
    Mutant(
        "several payments count as one",
        f"{_ACCOUNTING}:_joined",
        "return [replace(entry, count=last[0].count + entry.count)]",
        "return [entry]",
        ("plain, bound 3", "agents", "local"),
    ),
    Mutant(
        "replace-one at half the price",
        f"{_ACCOUNTING}:_split",
        'factor = 2 if adjacency == "replace-one" else 1',
        "factor = 1",
        ("correlated, replace-one", "root", "tree", "local", "blocks"),
    ),
    Mutant(
        "several releases are charged as one",
        f"{_ACCOUNTING}:_split",
        "return factor * math.sqrt(sum(n * event.noise_multiplier**-2 for event, n in some))",
        "return factor * math.sqrt(sum(event.noise_multiplier**-2 for event, n in some))",
        ("plain, bound 3", "local"),
    ),
    Mutant(
        "Poisson samples are charged at half their rate",
        f"{_ACCOUNTING}:_one_kind",
        "sampling_prob=part.rate,",
        "sampling_prob=part.rate / (2 if pessimistic else 1),",
        ("plain, bound 3, sampled", "weighted, sampled"),
    ),
    Mutant(
        "an agent without data adds no noise",
        f"{_SHARES}.contribution",
        "return self.bounded(values) + self.share_of_noise(noise=noise, path=path)",
        "return self.bounded(values) + self.share_of_noise(noise=noise, path=path) * "
        "int(bool(self.bounded(values).any()))",
        ("agents", "records"),
    ),
    Mutant(
        "rounded outwards",
        "botorch_fed.privacy.distributed:DistributedGaussianSum.bounded",
        "return self.grid.to_integers(values)",
        "return (values / self.grid.step).abs().ceil().mul(values.sign()).to(torch.int64)",
        ("agents, coarse grid",),
    ),
    Mutant(
        "vectors are rounded before they are clipped",
        "botorch_fed.privacy.distributed:DistributedGaussianSum.bounded",
        "values = clip(values.detach(), self.clip_norm)",
        "values = clip(values.detach(), 1.5 * self.clip_norm)",
        ("agents", "agents, replace-one"),
    ),
    Mutant(
        "a discrete Gaussian of half the width",
        "botorch_fed.privacy.hazmat.noise:discrete_gaussian",
        "stairs = _staircase(float(std))",
        "stairs = _staircase(float(std) / 2)",
        ("agents, wide",),
    ),
    Mutant(
        "noise where there are data only",
        f"{_SUMS}.release",
        _NOISED,
        f"{_NOISED}; noised = torch.where(total == 0, total, noised)",
        _EVERY_SUM,
    ),
    Mutant(
        "records that are not finite are taken",
        f"{_RECORDS}.check",
        "if not bool(records.isfinite().all()):",
        "if False:",
        ("local", "root", "records"),
    ),
    Mutant(
        "the weights of some outputs are doubled",
        f"{_MODULE}:WeightedGaussianSum._weighted",
        "columns = self._weight_array[:, agents] * factors",
        "columns = self._weight_array[:, agents] * factors * "
        "np.arange(1, 1 + self._outputs)[:, None]",
        ("weighted, bound 3", "weighted, sampled"),
    ),
    Mutant(
        "regions are mixed after the noise only",
        f"{_MODULE}:CorrelatedGaussianSum._mix",
        "return self._root(total)",
        "return 2 * total",
        ("correlated",),
    ),
    Mutant(
        "off-diagonal products count once",
        f"{_RECORDS}.products",
        "upper = a.index_select(1, rows).mul_(a.index_select(1, columns)).mul_(_SQRT2)",
        "upper = a.index_select(1, rows).mul_(a.index_select(1, columns)).mul_(2 * _SQRT2)",
        ("local", "records", "root"),
    ),
    Mutant(
        "nodes of a tree share noise every four steps",
        "botorch_fed.privacy.tree:PrefixSum.step",
        known._FRESH,
        known._FRESH.replace('"step", t', '"step", t % 4'),
        ("tree", "root"),
    ),
    Mutant(
        "the last record of a step counts twice",
        "botorch_fed.privacy.tree:PrefixSum.step",
        "total = state.total + self.statistic.rounded_sum(records, state.step)",
        "total = state.total + self.statistic.rounded_sum(records, state.step) + "
        "self.statistic.rounded_sum(records[-1:], state.step)",
        ("root", "tree"),
    ),
    Mutant(
        "the first outcome of a block counts twice",
        "botorch_fed.privacy.increments:BlockSum.add",
        "total = state.total + int((clipped / step).round().to(torch.int64).sum())",
        "total = state.total + int((clipped / step).round().to(torch.int64).sum()) * "
        "(2 if not state.count else 1)",
        ("blocks", "blocks, zero-out"),
    ),
    Mutant(
        "even points of the lattice only",
        "botorch_fed.privacy.hazmat.noise:lattice_gaussian",
        "return cells.round_().add_(draws).add_(0.0).mul_(step)  # -0.0 + 0.0 = 0.0",
        "return cells.round_().add_(draws).div_(2).round_().mul_(2).add_(0.0).mul_(step)",
        ("plain, bound 3", "local"),
    ),
    Mutant(
        "one number in a hundred without noise",
        "botorch_fed.privacy.hazmat.noise:lattice_gaussian",
        _DRAWS,
        f"{_DRAWS}; draws *= (torch.arange(draws.numel()) % 100 > 0).reshape(draws.shape)",
        ("plain, wide",),
    ),
)

# ------------------------------------------------------------------ whole protocols

_NOISY = "botorch_fed.aggregation.noisy:NoisySum"
_STREAM = "botorch_fed.aggregation.stream"
_SITE = "botorch_fed.aggregation.sum_site:SumSite"
_INCREMENT = 'path=("increment", site.name or "", site.memory.t),'
_CONTRIBUTION = 'path=("contribution", order.t, order.epoch, self._name),'

# Of these the cases are protocols, see `botorch_fed.audits.SUBJECTS`.
PROTOCOL_LISTED = (
    Mutant(
        "the same draw is sent to two rosters",
        f"{_SITE}._drawn",
        _CONTRIBUTION,
        'path=("contribution", order.t, self._name),',
        ("summed", "summed, by settings"),
    ),
    Mutant(
        "a release that a crash has left is drawn anew",
        f"{_STREAM}:CentralStream._kept",
        "data = secrets.get(name)",
        "secrets.delete(name); data = None",
        ("joint", "public actions"),
    ),
)

PROTOCOL_OWN = (
    Mutant(
        "each outcome is clipped by itself",
        f"{_MODULE}:_clip_factors",
        "inside = norm * _INSIDE",
        "squares = np.vecdot(*2 * (rows.reshape(len(rows), 2, -1),)); rows = (rows.reshape("
        "len(rows), 2, -1) * np.minimum(1, norm / np.maximum(np.sqrt(squares), 1e-300))[..., None]"
        ").reshape(rows.shape); return rows, np.ones(len(rows)); inside = norm * _INSIDE",
        ("noisy sum, two outcomes",),
    ),
    Mutant(
        "each outcome is clipped by itself at agents",
        "botorch_fed.privacy.distributed:DistributedGaussianSum.bounded",
        "values = clip(values.detach(), self.clip_norm)",
        "values = clip(values.detach().reshape(2, -1), self.clip_norm).reshape(-1)",
        ("summed, two outcomes",),
    ),
    Mutant(
        "noise of one outcome only",
        f"{_SUMS}.release",
        _NOISED,
        f"{_NOISED}; noised[..., : self.dim // 2] = total[..., : self.dim // 2]",
        ("noisy sum, two outcomes",),
    ),
    Mutant(
        "more releases than were promised",
        f"{_NOISY}._contributing",
        "return state.t in planned and not state.exhausted",
        "return not state.exhausted",
        ("noisy sum",),
    ),
    Mutant(
        "releases of all rounds share their noise",
        f"{_NOISY}._release",
        'return mechanism.release(given, ledger=state.ledger, noise=noise, path=("release", '
        "state.t))",
        'return mechanism.release(given, ledger=state.ledger, noise=noise, path=("release",))',
        ("noisy sum", "noisy sum, sampled"),
    ),
    Mutant(
        "the ledger of a noisy sum is not kept",
        f"{_NOISY}.combine",
        "ledger=ledger,",
        "ledger=state.ledger,",
        ("noisy sum",),
    ),
    Mutant(
        "a stream is not paid for",
        f"{_STREAM}:CentralStream._spent",
        "return state.ledger.spend(mechanism.event, note=note, private=private)",
        "return state.ledger",
        ("joint", "public actions"),
    ),
    Mutant(
        "a stream begins anew in every round",
        f"{_STREAM}:JointStream.added",
        "if state.t == 0:",
        "if True:",
        ("joint",),
    ),
    Mutant(
        "increments of all rounds share their noise",
        f"{_STREAM}:LocalStream.sent",
        _INCREMENT,
        'path=("increment", site.name or ""),',
        ("local",),
    ),
    Mutant(
        "increments of all agents share their noise",
        f"{_STREAM}:LocalStream.sent",
        _INCREMENT,
        'path=("increment", site.memory.t),',
        ("local",),
    ),
    Mutant(
        "a site forgets what it has paid",
        f"{_SITE}._drawn",
        "ledger=ledger,",
        "ledger=self._ledger,",
        ("summed",),
    ),
    Mutant(
        "a site that is asked again draws nothing",
        f"{_SITE}._drawn",
        "draws=self._memory.draws + 1,",
        "draws=self._memory.draws + 1, **({'drawn': self._memory.drawn} "
        "if self._memory.drawn_t == order.t else {}),",
        ("summed",),
        (
            (
                "drawn=integers,",
                "**({} if self._memory.drawn_t == order.t else {'drawn': integers}),",
            ),
        ),
    ),
)

# Not of privacy, but of what noise is worth: the default search must not follow noise.
RELIABILITY = (
    Mutant(
        "reliability forgets the noise",
        "botorch_fed.search.noisy:Average.reliability",
        "noise = len(self.total) * self.variance + self.share**2 * alone",
        "noise = self.share**2 * alone",
        (),
    ),
    Mutant(
        "reliability forgets those who do not agree",
        "botorch_fed.search.noisy:Average.reliability",
        "noise = len(self.total) * self.variance + self.share**2 * alone",
        "noise = len(self.total) * self.variance",
        (),
    ),
    Mutant(
        "releases are as loud as they are",
        "botorch_fed.search.noisy:average_prior",
        "loudness = math.sqrt(reliability)",
        "loudness = 1.0",
        (),
    ),
    Mutant(
        "unreliable releases are heard",
        "botorch_fed.search.noisy:average_prior",
        "if average is None or reliability < max(min_reliability, 1e-12):",
        "if average is None:",
        (),
    ),
    Mutant(
        "the noise of an average is that of its last release",
        "botorch_fed.search.noisy:averaged",
        "average.variance + (share * noise_std) ** 2,",
        "(share * noise_std) ** 2,",
        (),
    ),
)

MUTANTS = LISTED + OWN
PROTOCOL_MUTANTS = PROTOCOL_LISTED + PROTOCOL_OWN


def protocol_failures(case: str, *, seed: int = 0, draws: int = 6, every: int = 9) -> list[str]:
    """What fails of a whole protocol, in few worlds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)
        subject = SUBJECTS[case]()
        checks = world_checks(subject, seed=seed, draws=draws, transcripts=8, every=every)
        checks += protocol_checks(subject, seed=seed)
    return [check.name for check in checks if not check.passed]


def audited_protocol(case: str, *, seed: int = 0, runs: int = 24) -> AuditReport:
    """The whole audit of a protocol; all worlds with the first seed, for chance is not in them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)
        return audit_protocol(SUBJECTS[case](), runs=runs, seed=seed, every=12 if seed else 1)
