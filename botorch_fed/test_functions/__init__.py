r"""Federated test problems, in the manner of `botorch.test_functions`.

::

    base             FederatedTestProblem: one BoTorch test problem per agent over common bounds
    synthetic        similar samples of a Gaussian process
    sklearn_tuning   support vector machines and small networks on scikit-learn's bundled data,
                     divided among agents
    bandits          the kernel bandit and rescaled benchmark functions, one for all agents
"""

from typing import TYPE_CHECKING

from botorch_fed.lazy import lazily

if TYPE_CHECKING:
    from botorch_fed.test_functions.bandits import (
        Camelback,
        KernelBandit,
    )
    from botorch_fed.test_functions.base import FederatedTestProblem
    from botorch_fed.test_functions.sklearn_tuning import NetworkTuning, SklearnTuning
    from botorch_fed.test_functions.synthetic import SyntheticGPAgents

_WHERE = {
    "bandits": ("Camelback", "KernelBandit"),
    "base": ("FederatedTestProblem",),
    "sklearn_tuning": ("NetworkTuning", "SklearnTuning"),
    "synthetic": ("SyntheticGPAgents",),
}

__all__ = [
    "Camelback",
    "FederatedTestProblem",
    "KernelBandit",
    "NetworkTuning",
    "SklearnTuning",
    "SyntheticGPAgents",
]

__getattr__, __dir__ = lazily(__name__, _WHERE)
