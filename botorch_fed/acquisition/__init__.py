r"""Acquisition: where to look next. Torch only; imports `models`, independent of protocols.

schedules      p_t, the weight of the agent's own model
theory         the condition and width of FTS' bound, information gain, published feature counts
regions        `Partition` of the cube, and the agents' weights in each region
thompson       `ThompsonSampling` on a drawn function, own or received
mixture        `MixtureEI`, `MixturePI`, `MixtureUCB` of `models.LocalSharedMixture`, in closed form
transfer       `TransferAcquisition` (TAF); its companion RGPE is `models.RankingEnsemble`
feasible       `FeasibleAcquisition`: any of them times the probability of success
optimize       `maximize` over the unit cube or a list of points
additive       `AdditiveGrid`: the bound of an additive model, coordinate by coordinate
confidence     `private_ucb_width`, `missed`: how far a private bound must reach, by the theorem
constructors   input constructors for BoTorch and Ax, registered on import

BoTorch's acquisition functions work on the package's models as well; `docs/conformance.rst` is the
table of which, of what is refused and why, and of where a closed form sees a normal instead of a
mixture. A test writes it.
"""

from botorch_fed.acquisition import constructors as _constructors  # noqa: F401 - registers them
from botorch_fed.acquisition.additive import AdditiveGrid
from botorch_fed.acquisition.confidence import missed, private_ucb_width
from botorch_fed.acquisition.feasible import FeasibleAcquisition
from botorch_fed.acquisition.mixture import MixtureEI, MixturePI, MixtureUCB
from botorch_fed.acquisition.optimize import maximize
from botorch_fed.acquisition.regions import (
    ExplorationSchedule,
    Partition,
    SoftmaxSchedule,
    exploration_weights,
)
from botorch_fed.acquisition.schedules import (
    Constant,
    InverseSquare,
    MixingSchedule,
    Polynomial,
    check_schedule,
)
from botorch_fed.acquisition.thompson import ThompsonSampling, weight_path
from botorch_fed.acquisition.transfer import TransferAcquisition

__all__ = [
    "AdditiveGrid",
    "Constant",
    "ExplorationSchedule",
    "FeasibleAcquisition",
    "InverseSquare",
    "MixingSchedule",
    "MixtureEI",
    "MixturePI",
    "MixtureUCB",
    "Partition",
    "Polynomial",
    "SoftmaxSchedule",
    "ThompsonSampling",
    "TransferAcquisition",
    "check_schedule",
    "exploration_weights",
    "maximize",
    "missed",
    "private_ucb_width",
    "weight_path",
]
