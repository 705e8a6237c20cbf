r"""Who defaults, has diabetes, dies in hospital: sites tune a classifier on their own patients.

Three tables of real people, dealt to agents of unequal sizes: the classification tasks of the
federated GP paper. **Smaller is better**: a value is an error on the agent's validation half and
``space.outcome.minimize`` is true. The paper states the tables, the numbers of agents and the
quantity skew. The rest was chosen by the objective's spread over Sobol points, before any Bayesian
optimisation was run on it:

====================  ==========================================================================
classifier            `SVC` with an RBF kernel, tolerance 1e-4, on inputs standardised by the
                      agent's training half; deterministic
parameters            `C` in [1, 1e3], `gamma` in [1e-4, 0.1] and the weight of the positive
                      class, `positive_weight`, in [10^-0.5, 10], all on a log scale
value                 1 - accuracy on the validation half; 1 - balanced accuracy and 1 - AUC are
                      options
rows used             400 per agent on average: a public, uniform subsample of the table, fixed
                      by the seed before anything is dealt
shares                Dirichlet, concentration 10, the same for both classes, above a floor of 20
                      rows per agent
split                 half and half within each agent, stratified
diabetes              the published balanced table; the full one is an option
SUPPORT               28 of 47 columns: no outcomes, nothing known only afterwards, no other
                      model's prediction or score; physiology imputed by the maintainers' normal
                      values, the rest by the medians of the agent's training half; nominal
                      variables one-hot
====================  ==========================================================================

Over 64 Sobol points (means over agents; seed 0; "constant": within 0.005 of always predicting the
majority, whose error is given):

==================  ========  ===================================  ========  ============
task                majority  minimum, quartiles, maximum          constant  common point
==================  ========  ===================================  ========  ============
credit default      0.219     0.183   0.217  0.244  0.307   0.779  24 %      0.196
diabetes, balanced  0.501     0.266   0.316  0.345  0.376   0.502  7 %       0.287
diabetes, full      0.138     0.131   0.142  0.176  0.205   0.632  27 %      0.137
SUPPORT             0.267     0.224   0.252  0.275  0.292   0.733  18 %      0.237
==================  ========  ===================================  ========  ============

In the wider box `C` in [1e-2, 1e3], `gamma` in [1e-4, 10], weight in [0.1, 10] 34 to 62 % were
constant: small `C gamma` and small weights always say no, and large `gamma` remembers. The largest
errors come from one corner, a large weight with small `C gamma`, where all are predicted positive;
elsewhere the objectives are shallow: mirroring one coordinate moves the median error by 3 to 13
validation rows of about 200. The smallest of 64 noisy errors is optimistic; that of their mean over
the agents ("common point") is nearer to what can be gained. An error near zero cannot be reached on
any of these tables. Accuracy is nearly flat where one class is rare, which is why the other scores
are there.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.problems.data import load_arrays
from botorch_fed.rng import generator
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.test_functions.base import FederatedTestProblem, check_points
from botorch_fed.test_functions.sklearn_tuning import deal_rows, halve_rows

Score = Literal["accuracy", "balanced_accuracy", "auc"]
Matrix = NDArray[np.float64]
Labels = NDArray[np.intp]

ROWS_PER_AGENT = 400
CONCENTRATION = 10.0
CREDIT_ORIGIN = "Default of Credit Card Clients, UCI Machine Learning Repository, data set 350"
DIABETES_ORIGIN = "CDC Diabetes Health Indicators, UCI Machine Learning Repository, data set 891"
SUPPORT_ORIGIN = "SUPPORT2, hbiostat.org/data; UCI Machine Learning Repository, data set 880"

# Of SUPPORT: outcomes or known only afterwards; predictions and scores of other models; interview
# values of which `adlsc` is the imputed version.
AFTERWARDS = (
    "death",
    "hospdead",
    "slos",
    "d.time",
    "sfdm2",
    "charges",
    "totcst",
    "totmcst",
    "avtisst",
    "dnr",
    "dnrday",
)
OTHER_MODELS = ("surv2m", "surv6m", "prg2m", "prg6m", "aps", "sps")
INTERVIEWS = ("adlp", "adls")
NOMINAL = ("dzgroup", "dzclass", "race")
NORMAL = {
    "alb": 3.5,
    "pafi": 333.3,
    "bili": 1.01,
    "crea": 1.01,
    "bun": 6.51,
    "wblc": 9.0,
    "urine": 2502.0,
}


class _RiskTuning(FederatedTestProblem):
    """Validation error of a support vector machine on each agent's rows of one table.

    Args:
        X: The table, `n x d`; missing values are NaN.
        y: The classes, 0 or 1, `n`.
        num_agents: Number of agents.
        score: What an error is one minus of.
        outcomes: The public scale of outcomes for every score.
        rows_per_agent: Rows per agent on average, both halves together.
        concentration: Of the Dirichlet distribution of the shares; smaller is more unequal.
        seed: Seed of the subsample and the shares; part of the problem's definition.
    """

    def __init__(
        self,
        X: Matrix,
        y: Labels,
        *,
        num_agents: int,
        score: Score,
        outcomes: dict[Score, Outcome],
        rows_per_agent: int,
        concentration: float,
        seed: int,
    ) -> None:
        if score not in outcomes:
            raise UnsupportedError(f"score must be one of {list(outcomes)}, got {score!r}.")
        if num_agents < 1 or rows_per_agent < 1:
            raise InputDataError(
                f"Expected at least 1 agent and 1 row, got {num_agents} and {rows_per_agent}."
            )
        if not (math.isfinite(concentration) and concentration >= 0.01):
            raise InputDataError(
                f"concentration must be finite and at least 0.01, got {concentration}."
            )
        total = num_agents * rows_per_agent
        if total > len(y):
            raise InputDataError(
                f"{num_agents} agents with {rows_per_agent} rows each need {total} rows, the table "
                f"has {len(y)}: lower rows_per_agent."
            )
        self.score = score
        self.space = SearchSpace(
            (
                Parameter.real("C", 1.0, 1e3, scale="log"),
                Parameter.real("gamma", 1e-4, 0.1, scale="log"),
                Parameter.real("positive_weight", 10**-0.5, 10.0, scale="log"),
            ),
            outcomes[score],
        )
        # Public: it depends on the seed and the length of the table alone.
        used = generator(seed, "subsample").uniform(len(y)).argsort()[:total].sort().values.numpy()
        X, y = X[used], y[used]
        self._halves = []
        for rows in deal_rows(y, num_agents, "size", concentration, seed):
            ((train, test),) = halve_rows(rows, y[rows], 1)
            A, B = _standardized(X[train], X[test])
            self._halves.append((A, y[train], B, y[test]))

    def __len__(self) -> int:
        return len(self._halves)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        """Noise-free errors of an agent at `n x d` points of the unit cube, an `n` tensor."""
        check_points(X, self.dim)
        values = [self._error(agent, **point) for point in self.space.from_unit(X)]  # type: ignore[arg-type]
        return torch.tensor(values, dtype=torch.float64)

    def majority_error(self, agent: int) -> float:
        """The error of always predicting the more frequent class of the training half.

        What there is to beat: 1 - accuracy; for the other scores it is 0.5.
        """
        if self.score != "accuracy":
            return 0.5
        _, train_y, _, test_y = self._halves[agent]
        return float((test_y != np.bincount(train_y).argmax()).mean())

    def _error(self, agent: int, *, C: float, gamma: float, positive_weight: float) -> float:
        from sklearn.metrics import balanced_accuracy_score, roc_auc_score
        from sklearn.svm import SVC

        train_X, train_y, test_X, test_y = self._halves[agent]
        machine = SVC(C=C, gamma=gamma, class_weight={1: positive_weight}, tol=1e-4)
        decisions = machine.fit(train_X, train_y).decision_function(test_X)
        if self.score == "auc":
            return 1 - float(roc_auc_score(test_y, decisions))
        predicted = (decisions > 0).astype(int)
        if self.score == "balanced_accuracy":
            return 1 - float(balanced_accuracy_score(test_y, predicted))
        return float((predicted != test_y).mean())


class CreditDefault(_RiskTuning):
    """Which of 30,000 credit card clients default next month (22 %), by 23 attributes.

    Args:
        num_agents: Number of agents.
        score: What the error is one minus of; accuracy is nearly flat, see the module.
        rows_per_agent: Rows per agent on average, both halves together.
        concentration: Of the Dirichlet distribution of the shares; smaller is more unequal.
        seed: Seed of the subsample and the shares; part of the problem's definition.
        data: The folder of `credit_default.npz`; default the one named by ``BOTORCH_FED_DATA``.

    Example:
        >>> problem = CreditDefault(data="data")
        >>> problem[0](torch.full((1, 3), 0.5, dtype=torch.float64))
        tensor([0.2...], dtype=torch.float64)
    """

    def __init__(
        self,
        num_agents: int = 30,
        *,
        score: Score = "accuracy",
        rows_per_agent: int = ROWS_PER_AGENT,
        concentration: float = CONCENTRATION,
        seed: int = 0,
        data: str | Path | None = None,
    ) -> None:
        arrays = load_arrays("credit_default.npz", ("X", "y"), folder=data, origin=CREDIT_ORIGIN)
        super().__init__(
            arrays["X"].astype(np.float64),
            arrays["y"].astype(np.intp),
            num_agents=num_agents,
            score=score,
            outcomes=_outcomes(0.25, 0.1),
            rows_per_agent=rows_per_agent,
            concentration=concentration,
            seed=seed,
        )


class DiabetesHealth(_RiskTuning):
    """Who of a health survey has prediabetes or diabetes, by 21 answers.

    Args:
        num_agents: Number of agents.
        table: ``"balanced"``: 70,692 rows, half of them positive; ``"full"``: 253,680 rows, 14 %
            positive, where hardly anything beats always saying no.
        score: What the error is one minus of.
        rows_per_agent: Rows per agent on average, both halves together.
        concentration: Of the Dirichlet distribution of the shares; smaller is more unequal.
        seed: Seed of the subsample and the shares; part of the problem's definition.
        data: The folder of `diabetes_health.npz`; default the one named by ``BOTORCH_FED_DATA``.
    """

    def __init__(
        self,
        num_agents: int = 30,
        *,
        table: Literal["balanced", "full"] = "balanced",
        score: Score = "accuracy",
        rows_per_agent: int = ROWS_PER_AGENT,
        concentration: float = CONCENTRATION,
        seed: int = 0,
        data: str | Path | None = None,
    ) -> None:
        if table not in ("balanced", "full"):
            raise UnsupportedError(f'table must be "balanced" or "full", got {table!r}.')
        names = ("X_balanced", "y_balanced") if table == "balanced" else ("X", "y")
        arrays = load_arrays("diabetes_health.npz", names, folder=data, origin=DIABETES_ORIGIN)
        super().__init__(
            arrays[names[0]].astype(np.float64),
            arrays[names[1]].astype(np.intp),
            num_agents=num_agents,
            score=score,
            outcomes=_outcomes(0.35, 0.05) if table == "balanced" else _outcomes(0.2, 0.05),
            rows_per_agent=rows_per_agent,
            concentration=concentration,
            seed=seed,
        )


class SupportMortality(_RiskTuning):
    """Which of 9,105 seriously ill patients die in hospital (26 %).

    Args:
        num_agents: Number of agents.
        score: What the error is one minus of.
        rows_per_agent: Rows per agent on average, both halves together.
        concentration: Of the Dirichlet distribution of the shares; smaller is more unequal.
        seed: Seed of the subsample and the shares; part of the problem's definition.
        data: The folder of `support2.npz`; default the one named by ``BOTORCH_FED_DATA``.
    """

    def __init__(
        self,
        num_agents: int = 9,
        *,
        score: Score = "accuracy",
        rows_per_agent: int = ROWS_PER_AGENT,
        concentration: float = CONCENTRATION,
        seed: int = 0,
        data: str | Path | None = None,
    ) -> None:
        names = ("X", "y", "columns", *(f"levels_{name}" for name in NOMINAL))
        arrays = load_arrays("support2.npz", names, folder=data, origin=SUPPORT_ORIGIN)
        levels = {name: len(arrays[f"levels_{name}"]) for name in NOMINAL}
        super().__init__(
            _support_columns(arrays["X"].astype(np.float64), arrays["columns"].tolist(), levels),
            arrays["y"].astype(np.intp),
            num_agents=num_agents,
            score=score,
            outcomes=_outcomes(0.3, 0.05),
            rows_per_agent=rows_per_agent,
            concentration=concentration,
            seed=seed,
        )


def _outcomes(centre: float, scale: float) -> dict[Score, Outcome]:
    return {
        "accuracy": Outcome(centre, scale, minimize=True),
        "balanced_accuracy": Outcome(0.4, 0.05, minimize=True),
        "auc": Outcome(0.28, 0.04, minimize=True),
    }


def _support_columns(X: Matrix, names: list[str], levels: dict[str, int]) -> Matrix:
    """The admissible columns, nominal ones one-hot (a missing code is none), `n x d`."""
    columns: list[Matrix] = []
    for name, column in zip(names, X.T, strict=True):
        if name in AFTERWARDS + OTHER_MODELS + INTERVIEWS:
            continue
        if name in levels:
            columns += [(column == code).astype(np.float64) for code in range(levels[name])]
        elif name in NORMAL:
            columns.append(np.where(np.isnan(column), NORMAL[name], column))
        else:
            columns.append(column)
    return np.stack(columns, axis=-1)


def _standardized(train: Matrix, test: Matrix) -> tuple[Matrix, Matrix]:
    """Both halves, imputed and scaled by the training half alone."""
    unseen = np.isnan(train).all(axis=0)
    middle = np.nanmedian(np.where(unseen, 0.0, train), axis=0)
    train, test = (np.where(np.isnan(half), middle, half) for half in (train, test))
    centre, spread = train.mean(axis=0), train.std(axis=0)
    spread[spread == 0] = 1.0  # constant in the training half
    return (train - centre) / spread, (test - centre) / spread
