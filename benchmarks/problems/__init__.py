r"""Federated test problems on data that are not bundled; see `data` for where they are looked for.

landmine    29 landmine fields, tune a support vector machine
activity    30 wearers of a smartphone, tune the training of a logistic regression
digits      50 writers of digits, tune the training of a convolutional network
risk        credit default, diabetes and mortality tables dealt to agents, tune a classifier
cec2005     the first 20 functions of the CEC-2005 benchmark, one for all agents
separable   two functions of many variables, one for all agents; they need no data
"""

from benchmarks.problems.activity import ActivityRecognition
from benchmarks.problems.cec2005 import CEC2005
from benchmarks.problems.digits import WriterDigits
from benchmarks.problems.landmine import Landmine
from benchmarks.problems.risk import CreditDefault, DiabetesHealth, SupportMortality
from benchmarks.problems.separable import Michalewicz, StyblinskiTang

__all__ = [
    "CEC2005",
    "ActivityRecognition",
    "CreditDefault",
    "DiabetesHealth",
    "Landmine",
    "Michalewicz",
    "StyblinskiTang",
    "SupportMortality",
    "WriterDigits",
]
