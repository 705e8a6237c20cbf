r"""Federated test problems, in the manner of `botorch.test_functions`.

base             FederatedTestProblem: one BoTorch test problem per agent over common bounds
data             where data sets that are not bundled are looked for
synthetic        Gaussian process samples at a known distance from each other
landmine         29 landmine fields, tune a support vector machine
activity         30 wearers of a smartphone, tune the training of a logistic regression
digits           50 writers of digits, tune the training of a convolutional network
sklearn_tuning   scikit-learn's bundled data dealt to agents, tune a support vector machine
risk             credit default, diabetes and mortality tables dealt to agents, tune a classifier
cec2005          the first 20 functions of the CEC-2005 benchmark, one for all agents
bandits          the kernel bandit and rescaled benchmark functions, one for all agents
"""

from botorch_fed.test_functions.activity import ActivityRecognition
from botorch_fed.test_functions.bandits import (
    Camelback,
    KernelBandit,
    Michalewicz,
    StyblinskiTang,
)
from botorch_fed.test_functions.base import FederatedTestProblem
from botorch_fed.test_functions.cec2005 import CEC2005
from botorch_fed.test_functions.digits import WriterDigits
from botorch_fed.test_functions.landmine import Landmine
from botorch_fed.test_functions.risk import CreditDefault, DiabetesHealth, SupportMortality
from botorch_fed.test_functions.sklearn_tuning import SklearnTuning
from botorch_fed.test_functions.synthetic import SyntheticGPAgents

__all__ = [
    "CEC2005",
    "ActivityRecognition",
    "Camelback",
    "CreditDefault",
    "DiabetesHealth",
    "FederatedTestProblem",
    "KernelBandit",
    "Landmine",
    "Michalewicz",
    "SklearnTuning",
    "StyblinskiTang",
    "SupportMortality",
    "SyntheticGPAgents",
    "WriterDigits",
]
