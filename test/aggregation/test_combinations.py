"""Messages of other searches in encrypted and noisy sums: a product of parts, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.aggregation.secure_sum import SecureSum
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.terms import Search, Terms, View
from botorch_fed.privacy import Budget
from botorch_fed.privacy.distributed import DistributedGaussianSum
from botorch_fed.privacy.hazmat.noise import InsecureSeededNoise, OSNoise
from botorch_fed.run import RunResult, run
from botorch_fed.search.noisy import NoisyTransfer
from botorch_fed.search.released import Following, ReleaseSearch
from botorch_fed.search.releases import Noisy, Sum
from botorch_fed.search.thompson import ThompsonSearch
from botorch_fed.search.transfer import default_private_features
from botorch_fed.studies import DPFTSDE, FTS, FedGP
from test.aggregation.harness import HILLS, NAMES, SQUARE, Federation, trace

pytestmark = pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")

PHI = default_private_features(SQUARE)
QUICK: dict[str, Any] = {"num_raw": 64, "num_restarts": 4, "num_features": 64}
CHANNELS = ("plain", "ckks", "threshold")


@dataclass(frozen=True)
class BestSum(Search):
    """A uniform point; sites add their best outcome, as a search of one's own may."""

    has_basis = False

    def size(self, terms: Terms) -> int:
        """One number."""
        return 1

    def message(self, view: View) -> Tensor:
        """The best outcome."""
        return view.Y.max().reshape(1)

    def point(self, view: View) -> Tensor:
        """Half way to the corner that the sum of the others points to."""
        found: Sum | None = view.release
        stream = view.stream("mine", view.n)
        if found is None or found.others is None:
            return stream.uniform(1, view.terms.space.dim)
        return stream.uniform(1, view.terms.space.dim) * found.others.abs().clamp(max=1.0)


SEARCHES: dict[str, Search] = {
    "own mean": NoisyTransfer(min_reliability=0.0),
    "gain": ReleaseSearch(strategy=Following(follow=2, **QUICK)),
    "own search": BestSum(),
}


def gaussian(dim: int, num_agents: int) -> DistributedGaussianSum:
    return DistributedGaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=1.0, noise_multiplier=0.5
    )


def study(search: Search, channel: Any, *, noise: Any = None, **settings: Any) -> FedGP:
    options: dict[str, Any] = {"channel": channel, "releases": (0, 2), **settings}
    if noise is not None:
        options |= {"mechanism": gaussian, "noise_at": "agent"}
    return FedGP(
        budget=6,
        num_initial=3,
        search=search,  # type: ignore[arg-type]
        feature_map=PHI if search.has_basis else None,
        aggregation=SecureSum(**options),
        noise=InsecureSeededNoise(3) if noise is None else noise,
    )


def ran(protocol: Any) -> RunResult:
    result = run(protocol, HILLS, space=SQUARE, seed=1, progress=False)
    assert {row["failure"] for row in result.rounds} == {None}
    return result


@pytest.mark.parametrize("which", SEARCHES)
@pytest.mark.parametrize("noisy", [False, True])
def test_vectors_of_any_search_under_any_channel(which: str, noisy: bool) -> None:
    noise = InsecureSeededNoise(3) if noisy else None
    results = [ran(study(SEARCHES[which], channel, noise=noise)) for channel in CHANNELS]
    for result in results:
        assert result.privacy is not None
        assert result.privacy["sums"] == 2  # of rounds 0 and 2
        assert all(len(result.history(name)[0]) == 6 for name in NAMES)
    assert len({trace(result) for result in results}) == 1


@pytest.mark.parametrize("which", ["own mean", "gain"])
def test_releases_without_a_trusted_server(which: str) -> None:
    """Agents' own noise under a joint key: what they read is the mean of what they have sent."""
    noise = InsecureSeededNoise(3)
    federation = Federation(study(SEARCHES[which], "threshold", noise=noise))
    federation.drive()
    assert federation.end.sums == 2
    for name in NAMES:
        agent, state = federation.sites[name].agent, federation.sites[name].state
        read = agent._view(state, agent._terms(state.broadcasts)).release  # type: ignore[attr-defined]
        newest = federation.memory(name).newest
        assert isinstance(read, Noisy)
        assert newest is not None
        assert newest.total is not None
        assert torch.equal(read.values.squeeze(0), newest.total / 3)
        mechanism = gaussian(PHI.num_features, 3)
        assert float(read.noise_std) == pytest.approx(mechanism.agent_std * 3**0.5 / 3)
        assert federation.releases(name) == 2
    price = federation.server.honest.price
    assert price.paid_at == "site"
    assert price.payments == price.releases == 2
    assert federation.server.honest.privacy(federation.end)["epsilon"] == price.epsilon


def test_a_site_requires_what_the_sums_of_other_vectors_promise() -> None:
    made = study(SEARCHES["own mean"], "threshold", noise=OSNoise())
    promise = made.server(SQUARE, NAMES).promise
    assert promise is not None
    enough = replace(made, require=Budget(promise.epsilon, promise.delta))
    federation = Federation(enough)
    federation.drive()
    assert federation.codes("ann") == set()
    too_little = replace(made, require=Budget(0.99 * promise.epsilon, promise.delta))
    with pytest.raises(ProtocolError, match="refuse to begin"):
        Federation(too_little).drive()


# ------------------------------------------------------------------ what does not go together


def test_what_a_sum_does_not_carry() -> None:
    with pytest.raises(InputDataError, match="ThompsonSearch reads the message of each agent"):
        study(ThompsonSearch(), "plain").server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match="leave num_regions out"):
        study(ReleaseSearch(num_regions=2), "plain").server(SQUARE, NAMES)
    with pytest.raises(InputDataError, match="reads the message of each agent"):
        FTS(budget=5, aggregation=SecureSum(channel="plain")).server(SQUARE, NAMES)


def test_a_study_with_another_aggregation() -> None:
    protocol = DPFTSDE(budget=6, aggregation=SecureSum(channel="threshold", releases=(0,)))
    result = ran(protocol)
    assert result.privacy is not None
    assert result.privacy["sums"] == 1
    assert result.privacy["channel"] == "ThresholdCKKSChannel"
