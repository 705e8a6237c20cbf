r"""Federated test problems, in the manner of `botorch.test_functions`.

base             FederatedTestProblem: one BoTorch test problem per agent over common bounds
synthetic        Gaussian process samples at a known distance from each other
sklearn_tuning   scikit-learn's bundled data dealt to agents, tune a support vector machine
bandits          the kernel bandit and rescaled benchmark functions, one for all agents
"""

from botorch_fed.test_functions.bandits import (
    Camelback,
    KernelBandit,
)
from botorch_fed.test_functions.base import FederatedTestProblem
from botorch_fed.test_functions.sklearn_tuning import SklearnTuning
from botorch_fed.test_functions.synthetic import SyntheticGPAgents

__all__ = [
    "Camelback",
    "FederatedTestProblem",
    "KernelBandit",
    "SklearnTuning",
    "SyntheticGPAgents",
]
