r"""Federated test problems, in the manner of `botorch.test_functions`.

base        FederatedTestProblem: one BoTorch test problem per agent over common bounds
data        where data sets that are not bundled are looked for
landmine    29 landmine fields, tune a support vector machine
"""

from botorch_fed.test_functions.base import FederatedTestProblem
from botorch_fed.test_functions.landmine import Landmine

__all__ = ["FederatedTestProblem", "Landmine"]
