r"""Hyperparameter tuning on the data sets of scikit-learn, without a download.

The rows of a data set are divided among agents with unequal sizes or unequal class shares, drawn
from a Dirichlet distribution as in [Hsu2019]_ but above a floor, so that no agent is without data.
Each agent tunes a classifier on its rows: an RBF support vector machine (`SklearnTuning`) or a
small neural network (`NetworkTuning`).

The score is the validation AUC of the decision function for two classes and the accuracy for more
classes, averaged over a few stratified halvings: an agent has few rows, and the score of a single
half changes in coarse steps. No class probabilities are estimated and the solver runs to tolerance
1e-6, so that values are deterministic.

References:
    * [Hsu2019]_ T.-M. H. Hsu, H. Qi, M. Brown. Measuring the effects of non-identical data
      distribution for federated visual classification. arXiv:1909.06335, 2019.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any, Literal

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from numpy.typing import NDArray
from scipy.special import gammaincinv
from torch import Tensor

from botorch_fed.rng import generator
from botorch_fed.space import Outcome, Parameter, Scale, SearchSpace, Value
from botorch_fed.test_functions.base import FederatedTestProblem, check_points

Dataset = Literal["breast_cancer", "digits", "wine"]
Skew = Literal["none", "size", "label"]
Solver = Literal["adam", "sgd"]

FLOOR = 20  # least rows of an agent, in the classes' proportions; at least 2 of each class

# Training and validation rows as indices into the data set.
Halves = tuple[NDArray[np.intp], NDArray[np.intp]]


class SklearnTuning(FederatedTestProblem):
    """Validation score of a support vector machine on each agent's share of a bundled data set.

    Every agent gets a floor of about 20 rows in the classes' proportions, at least two of each
    class, so that every class is in both halves. `skew` divides the remaining rows.

    Args:
        num_agents: Number of agents.
        dataset: ``"breast_cancer"`` (569 rows, 2 classes), ``"digits"`` (1,797 rows, 10 classes)
            or ``"wine"`` (178 rows, 3 classes; no more than 8 agents fit).
        skew: ``"none"``: equal shares; ``"size"``: unequal shares, the same for all classes;
            ``"label"``: unequal shares, drawn for each class.
        concentration: Concentration of the Dirichlet distribution; smaller is more unequal.
        splits: Number of random halvings of an agent's rows over which a score is averaged.
        scale: Whether `C` and `gamma` are on a log or a linear scale.
        seed: Seed of the shares and halves; part of the problem's definition.

    Example:
        >>> problem = SklearnTuning(8)
        >>> problem[0](torch.tensor([[0.7, 0.5]], dtype=torch.float64))
        tensor([0.9...], dtype=torch.float64)
    """

    def __init__(
        self,
        num_agents: int = 8,
        *,
        dataset: Dataset = "breast_cancer",
        skew: Skew = "label",
        concentration: float = 1.0,
        splits: int = 3,
        scale: Scale = "log",
        seed: int = 0,
    ) -> None:
        if skew not in ("none", "size", "label"):
            raise UnsupportedError(f'skew must be "none", "size" or "label", got {skew!r}.')
        if num_agents < 1 or splits < 1:
            raise InputDataError(
                f"Expected at least 1 agent and 1 split, got {num_agents} and {splits}."
            )
        if not (math.isfinite(concentration) and concentration >= 0.01):
            raise InputDataError(
                f"concentration must be finite and at least 0.01, got {concentration}."
            )
        self._X, self._y = _load(dataset)
        self._num_classes = len(np.unique(self._y))
        outcome = Outcome(0.95, 0.05) if self._num_classes == 2 else Outcome(0.8, 0.2)
        self.space = SearchSpace(self._parameters(scale), outcome)
        self._halves = [
            halve_rows(rows, self._y[rows], splits)
            for rows in deal_rows(self._y, num_agents, skew, concentration, seed)
        ]
        self._known: dict[tuple[int, tuple[Value, ...]], float] = {}

    def __len__(self) -> int:
        return len(self._halves)

    def _parameters(self, scale: Scale) -> tuple[Parameter, ...]:
        return (
            Parameter.real("C", 1e-3, 1e3, scale=scale),
            Parameter.real("gamma", 1e-4, 1.0, scale=scale),
        )

    @property
    def default(self) -> dict[str, Value]:
        """The defaults of scikit-learn's `SVC()`: C = 1 and gamma = 1 / (number of varying inputs).

        This is ``gamma="scale"`` on standardised inputs, computed from the public data set.
        """
        return {"C": 1.0, "gamma": 1.0 / int((self._X.std(axis=0) > 0).sum())}

    def pooled(self) -> SklearnTuning:
        """The same agents and validation rows, trained on the training rows of all agents.

        The difference from this problem, value by value, is the gain of sharing data.
        """
        together = [
            np.concatenate([train for train, _ in halves])
            for halves in zip(*self._halves, strict=True)
        ]
        other = copy.copy(self)
        other._known = {}
        other._halves = [
            [(train, test) for train, (_, test) in zip(together, halves, strict=True)]
            for halves in self._halves
        ]
        return other

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        check_points(X, self.dim)
        scores = [self._score_of(agent, point) for point in self.space.from_unit(X)]
        return torch.tensor(scores, dtype=torch.float64)

    def _score_of(self, agent: int, point: dict[str, Value]) -> float:
        """The mean score of an agent's halves, computed once: runs ask for it again."""
        key = agent, tuple(point.values())
        if key not in self._known:
            scores = [self._score(half, **point) for half in self._halves[agent]]
            self._known[key] = float(np.mean(scores))
        return self._known[key]

    def _score(self, halves: Halves, **settings: Value) -> float:
        from sklearn.metrics import roc_auc_score

        train, test = halves
        centre, spread = self._X[train].mean(axis=0), self._X[train].std(axis=0)
        spread[spread == 0] = 1.0  # constant in the training half, e.g. a corner pixel of digits
        machine = self._machine(len(train), **settings)
        try:
            with warnings.catch_warnings():  # a network stops after so many epochs, as it was told
                warnings.simplefilter("ignore")
                machine.fit((self._X[train] - centre) / spread, self._y[train])
        except ValueError:
            if not self._diverges:
                raise
            machine = _guessing(self._y[train])
        inputs = (self._X[test] - centre) / spread
        if self._num_classes == 2:
            return float(roc_auc_score(self._y[test], self._scores(machine, inputs)))
        return float((machine.predict(inputs) == self._y[test]).mean())

    @property
    def _diverges(self) -> bool:
        """Whether training may end in weights that are not finite, which scikit-learn refuses."""
        return False

    def _machine(self, rows: int, **settings: Any) -> Any:
        """The classifier, not yet trained, for so many training rows."""
        from sklearn.svm import SVC

        return SVC(tol=1e-6, **settings)

    def _scores(self, machine: Any, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """The larger, the likelier is the second of two classes."""
        scores: NDArray[np.float64] = machine.decision_function(inputs)
        return scores


class NetworkTuning(SklearnTuning):
    """Validation score of a small neural network on each agent's share of a bundled data set.

    Each agent tunes the learning rate, the weight decay, the hidden units and the batch size of
    scikit-learn's `MLPClassifier`, which trains for a fixed number of epochs; with stochastic
    gradient descent the momentum as well, and the learning rate over five decades. A network whose
    training diverges scores as one that always says the most common class.

    Args:
        num_agents: Number of agents.
        dataset: As in `SklearnTuning`.
        skew: As there.
        concentration: As there.
        splits: As there.
        epochs: Epochs of training. `MLPClassifier` by itself trains for 200, or until the loss
            falls no more.
        solver: ``"adam"``, or ``"sgd"``, for which good settings are rarer.
        seed: Seed of the shares and halves; part of the problem's definition.

    Example:
        >>> problem = NetworkTuning(8)
        >>> problem.default
        {'learning_rate': 0.001, 'alpha': 0.0001, 'hidden': 100, 'batch_size': 200}
    """

    def __init__(
        self,
        num_agents: int = 8,
        *,
        dataset: Dataset = "digits",
        skew: Skew = "label",
        concentration: float = 0.3,
        splits: int = 2,
        epochs: int = 20,
        solver: Solver = "adam",
        seed: int = 0,
    ) -> None:
        if epochs < 1:
            raise InputDataError(f"Expected at least 1 epoch, got {epochs}.")
        if solver not in ("adam", "sgd"):
            raise UnsupportedError(f'solver must be "adam" or "sgd", got {solver!r}.')
        self.epochs = epochs
        self.solver = solver
        super().__init__(
            num_agents,
            dataset=dataset,
            skew=skew,
            concentration=concentration,
            splits=splits,
            seed=seed,
        )

    def _parameters(self, scale: Scale) -> tuple[Parameter, ...]:
        sgd = self.solver == "sgd"
        found = (
            Parameter.real("learning_rate", 1e-4, 10.0 if sgd else 1.0, scale=scale),
            Parameter.real("alpha", 1e-6, 10.0, scale=scale),
            Parameter.integer("hidden", 4, 128, scale=scale),
            Parameter.integer("batch_size", 8, 200, scale=scale),
        )
        return (*found, Parameter.real("momentum", 0.0, 0.99)) if sgd else found

    @property
    def default(self) -> dict[str, Value]:
        """The defaults of scikit-learn's `MLPClassifier(solver=…)`."""
        found: dict[str, Value] = {
            "learning_rate": 1e-3,
            "alpha": 1e-4,
            "hidden": 100,
            "batch_size": 200,
        }
        return {**found, "momentum": 0.9} if self.solver == "sgd" else found

    @property
    def _diverges(self) -> bool:
        return self.solver == "sgd"

    def _machine(self, rows: int, **settings: Any) -> Any:
        from sklearn.neural_network import MLPClassifier

        return MLPClassifier(
            (settings["hidden"],),
            solver=self.solver,
            momentum=settings.get("momentum", 0.9),
            learning_rate_init=settings["learning_rate"],
            alpha=settings["alpha"],
            batch_size=min(settings["batch_size"], rows),
            max_iter=self.epochs,
            random_state=0,
        )

    def _scores(self, machine: Any, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        scores: NDArray[np.float64] = machine.predict_proba(inputs)[:, 1]
        return scores


def _guessing(y: NDArray[np.intp]) -> Any:
    """What says the most common class."""
    from sklearn.dummy import DummyClassifier

    return DummyClassifier(strategy="most_frequent").fit(np.zeros((len(y), 1)), y)


def _load(dataset: str) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    from sklearn.datasets import load_breast_cancer, load_digits, load_wine

    loaders = {"breast_cancer": load_breast_cancer, "digits": load_digits, "wine": load_wine}
    if dataset not in loaders:
        raise UnsupportedError(f"dataset must be one of {sorted(loaders)}, got {dataset!r}.")
    X, y = loaders[dataset](return_X_y=True)
    return X, y


def deal_rows(
    y: NDArray[np.intp], num_agents: int, skew: Skew, concentration: float, seed: int
) -> list[NDArray[np.intp]]:
    """Rows of every agent: disjoint, sorted, and together all rows.

    Args:
        y: The classes of all rows, `n`.
        num_agents: Number of agents.
        skew: How rows above the floor are divided; see `SklearnTuning`.
        concentration: Concentration of the Dirichlet distribution; smaller is more unequal.
        seed: Seed of the shares and of the order of the rows.

    Raises:
        InputDataError: There are too few rows of a class for the floor of every agent.
    """
    labels, counts = np.unique(y, return_counts=True)
    floors = np.maximum(2, np.ceil(FLOOR * counts / len(y))).astype(int)
    most = int((counts // floors).min())
    if num_agents > most:
        raise InputDataError(
            f"{num_agents} agents cannot each have {FLOOR} of {len(y)} rows in {len(labels)} "
            f"classes: take at most {most}."
        )
    hands: list[list[NDArray[np.intp]]] = [[] for _ in range(num_agents)]
    for label, count, floor in zip(labels, counts, floors, strict=True):
        # One stream per class for "label", the same stream for all classes otherwise.
        stream = generator(seed, "shares", int(label) if skew == "label" else "all")
        shares = np.full(num_agents, 1 / num_agents)
        if skew != "none":
            # Gamma variables over their sum are Dirichlet.
            shares = gammaincinv(concentration, stream.uniform(num_agents).numpy())
            shares = shares / shares.sum()
        borders = np.rint((count - num_agents * floor) * np.cumsum(shares)).astype(int)
        ends = borders + floor * np.arange(1, num_agents + 1)
        order = generator(seed, "rows", int(label)).uniform(int(count)).argsort().numpy()
        members = np.flatnonzero(y == label)[order]
        for hand, part in zip(hands, np.split(members, ends[:-1]), strict=True):
            hand.append(part)
    return [np.sort(np.concatenate(hand)) for hand in hands]


def halve_rows(rows: NDArray[np.intp], y: NDArray[np.intp], splits: int) -> list[Halves]:
    """Stratified random halvings of an agent's rows into training and validation rows.

    Args:
        rows: The agent's rows, as `deal_rows` gives them.
        y: Their classes, of the same length.
        splits: Number of halvings; the first ones do not depend on it.
    """
    from sklearn.model_selection import train_test_split

    return [
        tuple(train_test_split(rows, test_size=0.5, stratify=y, random_state=repeat))
        for repeat in range(splits)
    ]
