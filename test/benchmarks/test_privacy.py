"""What the privacy benchmark calls signal, and that its parts give the documented figures."""

from __future__ import annotations

import pytest
import torch

from benchmarks import privacy
from benchmarks.papers.published.settings import paper_settings
from botorch_fed.search.released import Following
from botorch_fed.studies import DPFTSDE
from botorch_fed.test_functions.synthetic import SyntheticGPAgents

AGENTS = SyntheticGPAgents(6, seed=0, perturbed="all", lengthscale=0.1)


@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
def test_the_prior_in_a_sample_is_no_signal() -> None:
    # At this noise variance the outcomes add nothing to the prior draw that an agent sends.
    deaf = paper_settings(1, num_regions=2, sampling_rate=1.0, noise_var=1e6)
    (found,) = privacy.strengths(deaf, AGENTS, 0, 1)
    assert bool((found.signal < 1e-3 * found.whole).all())
    assert bool((found.outcomes < 1e-3 * found.whole).all())
    assert bool((found.whole > 0).all())


@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
def test_an_agent_without_data_sends_no_gain() -> None:
    gains = DPFTSDE(budget=13, epsilon=2.0, strategy=Following())
    releases = list(privacy.strengths(gains, AGENTS, 0, 2))
    assert len(releases) == 2
    for found in releases:
        torch.testing.assert_close(found.signal, found.whole, rtol=0, atol=0)
        assert bool((found.signal > 0).all())


def test_parts_give_documented_figures() -> None:
    figures, tables = privacy.noise(quick=True)
    assert list(figures) == ["lattice_1e6_s"]
    assert len(tables) == 1
    keys = (
        "release_ratio_vs_numpy_sum",
        "release_peak_mb_1e6",
        "pld_1e4_rounds_s",
        "lattice_1e6_s",
        "regional_query_ms",
        "audit_pass",
        "mutants_caught",
        "mutants",
        "snr_gain_vs_paper",
    )
    assert privacy.__doc__ is not None
    assert all(key in privacy.__doc__ for key in keys)
    assert all(part in privacy.__doc__ for part in privacy.PARTS)
