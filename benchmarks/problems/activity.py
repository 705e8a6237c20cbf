r"""Human activity recognition: 30 wearers of a smartphone train a logistic regression.

The task of [Dai2020FTS]_ and [Dai2021]_ on the data of [Anguita2013]_: six activities from
561 features. Each subject's windows are split in half, stratified, and inputs are standardised on
the training half. The papers minimise the validation error; here larger is better, so the objective
is the validation accuracy, one minus that error. All 561 features are used, as in the papers.

The papers state the model and the ranges (batch size, L2 penalty, learning rate) but not the
optimiser. Here, chosen by the objective's spread and smoothness over random points of these data,
before any Bayesian optimisation was run on them:

- multinomial logistic regression from zero weights, with a bias that is not penalised;
- five epochs of stochastic gradient descent, without momentum or decay, in float64. More saturate
  the first box (at 20 epochs some subjects are constant) and make the second, whose learning rates
  are unstable, jagged;
- rows are an endless stream of shuffled passes cut into batches, so that every batch is full. The
  order comes from the seed and the subject, and is the same for all points. A batch size above the
  size of the training half means full batches;
- the penalty is a proximal step, `W <- (W - lr * gradient) / (1 + lr * l2)`: for
  small `lr * l2` the explicit step, and stable where that one diverges (`lr * l2` reaches 10);
- the model is the average of the second half of the iterates. The curvature of standardised inputs
  is about 100, so most learning rates of the papers oscillate, and the accuracy of the *last*
  iterate is jagged: in the first box, one more row per batch moves it by 0.054 (root mean square),
  more than its standard deviation over the box (0.044), against 0.012 for the average, about two
  validation rows. The last iterate is an option.

One person's activities are easily told apart: in the first box half of all values lie above 0.97,
and a subject's standard deviation over the box is 0.002 to 0.033. The second box is the harder
problem (median 0.64, best values about 0.95, standard deviation 0.08 to 0.21).

.. [Anguita2013] D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz. A public domain dataset
   for human activity recognition using smartphones. ESANN 2013.
.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020.
.. [Dai2021] Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
   optimization with distributed exploration. NeurIPS 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.problems.data import load_arrays
from botorch_fed.rng import generator
from botorch_fed.space import Outcome, Parameter, Scale, SearchSpace
from botorch_fed.test_functions.base import FederatedTestProblem, check_points

ORIGIN = (
    "Human Activity Recognition Using Smartphones, UCI Machine Learning Repository, data set 240"
)


@dataclass(frozen=True)
class _Subject:
    """One subject's halves: Gram matrices, all that training from zero weights needs."""

    gram: Tensor  # n x n, training rows
    cross: Tensor  # n' x n, validation against training rows
    labels: Tensor  # n x c, one-hot
    validation: Tensor  # n', class indices
    stream: Tensor  # row indices, epoch after epoch


class ActivityRecognition(FederatedTestProblem):
    """Validation accuracy of a logistic regression on each of 30 subjects.

    Points are trained together, and a point's value never depends on the others of the call.

    Args:
        ranges: ``"fts"``: batch size 20 to 60, L2 1e-6 to 1, learning rate 0.01 to 0.1;
            ``"dp-fts-de"``: 128 to 512, 1e-6 to 10, 1e-6 to 1.
        scale: Whether L2 and learning rate are on a linear scale, as in the papers, or a log scale;
            the batch size is always linear.
        iterate: Whether the model is the average of the second half of the iterates or the last
            one.
        epochs: How often every row is seen.
        seed: Seed of the order of the rows; part of the problem's definition.
        data: The folder of `har.npz`; default the one named by ``BOTORCH_FED_DATA``.

    Example:
        >>> problem = ActivityRecognition(data="data")
        >>> problem[0](torch.tensor([[0.5, 0.1, 0.5]], dtype=torch.float64))
        tensor([0.9...], dtype=torch.float64)
    """

    def __init__(
        self,
        *,
        ranges: Literal["fts", "dp-fts-de"] = "fts",
        scale: Scale = "linear",
        iterate: Literal["average", "last"] = "average",
        epochs: int = 5,
        seed: int = 0,
        data: str | Path | None = None,
    ) -> None:
        if ranges not in ("fts", "dp-fts-de"):
            raise UnsupportedError(f'ranges must be "fts" or "dp-fts-de", got {ranges!r}.')
        if iterate not in ("average", "last"):
            raise UnsupportedError(f'iterate must be "average" or "last", got {iterate!r}.')
        if epochs < 1:
            raise InputDataError(f"Expected at least 1 epoch, got {epochs}.")
        self.iterate = iterate
        self.epochs = epochs
        self.space = _space(ranges, scale)
        arrays = load_arrays("har.npz", ("X", "y", "subject"), folder=data, origin=ORIGIN)
        inputs, subjects = arrays["X"].astype(np.float64), arrays["subject"]
        classes, labels = np.unique(arrays["y"], return_inverse=True)
        self._subjects = []
        for name in np.unique(subjects):
            rows = subjects == name
            keys = generator(seed, "batches", int(name)).uniform(epochs, int(rows.sum()))
            self._subjects.append(_subject(inputs[rows], labels[rows], len(classes), keys))

    def __len__(self) -> int:
        return len(self._subjects)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        check_points(X, self.dim)
        predicted = self._logits(agent, X).argmax(dim=-1)
        return (predicted == self._subjects[agent].validation).double().mean(dim=-1)

    def _logits(self, agent: int, X: Tensor) -> Tensor:
        """Logits of the validation rows, `n x n' x c`."""
        subject = self._subjects[agent]
        points = self.space.from_unit(X)
        rates = [[p["l2"], p["learning_rate"]] for p in points]
        settings = torch.tensor(rates, dtype=torch.float64).reshape(len(X), 2)
        most = len(subject.gram)
        sizes = torch.tensor([min(int(p["batch_size"]), most) for p in points], dtype=torch.long)
        shape = (len(X), len(subject.cross), subject.labels.shape[-1])
        logits = torch.empty(shape, dtype=torch.float64)
        for size in sizes.unique().tolist():
            same = sizes == size
            logits[same] = self._train(subject, size, *settings[same].unbind(dim=-1))
        return logits

    def _train(self, subject: _Subject, size: int, l2: Tensor, rate: Tensor) -> Tensor:
        """Logits of the validation rows for points of one batch size, `k x n' x c`.

        Weights started at zero stay combinations of the training rows: with `A`, `k x n x c`, their
        coefficients, one step costs a product with a block of the Gram matrix, not with the inputs.
        Products are batched over points, never merged, and columns are padded to 64 bytes, so that
        no point's rounding depends on its place in the batch.
        """
        l2, rate = l2.view(-1, 1, 1), rate.view(-1, 1, 1)
        k, (n, c) = len(l2), subject.labels.shape
        width = -(-c // 8) * 8
        labels = torch.nn.functional.pad(subject.labels, (0, width - c))
        A, bias = torch.zeros(k, n, width).double(), torch.zeros(k, 1, width).double()
        bias[..., c:] = -torch.inf  # padding is never predicted, so it never gets a weight
        mean_A, mean_bias = torch.zeros_like(A), torch.zeros_like(bias)
        num_steps = self.epochs * n // size
        first = num_steps // 2
        for step in range(num_steps):
            rows = subject.stream[step * size : (step + 1) * size]
            logits = torch.bmm(subject.gram[rows].expand(k, -1, -1), A) + bias
            slope = rate / size * (logits.softmax(dim=-1) - labels[rows])
            A.index_add_(1, rows, slope, alpha=-1)  # a batch across two passes may repeat a row
            A /= 1 + rate * l2
            bias -= slope.sum(dim=1, keepdim=True)
            if step >= first:
                mean_A += A / (num_steps - first)
                mean_bias += bias / (num_steps - first)
        if self.iterate == "last":
            mean_A, mean_bias = A, bias
        return (torch.bmm(subject.cross.expand(k, -1, -1), mean_A) + mean_bias)[..., :c]


def _space(ranges: str, scale: Scale) -> SearchSpace:
    if ranges == "fts":
        parameters = (
            Parameter.integer("batch_size", 20, 60),
            Parameter.real("l2", 1e-6, 1.0, scale=scale),
            Parameter.real("learning_rate", 0.01, 0.1, scale=scale),
        )
        return SearchSpace(parameters, Outcome(centre=0.95, scale=0.02))
    parameters = (
        Parameter.integer("batch_size", 128, 512),
        Parameter.real("l2", 1e-6, 10.0, scale=scale),
        Parameter.real("learning_rate", 1e-6, 1.0, scale=scale),
    )
    return SearchSpace(parameters, Outcome(centre=0.8, scale=0.15))


def _subject(
    X: NDArray[np.float64], y: NDArray[np.intp], num_classes: int, keys: Tensor
) -> _Subject:
    from sklearn.model_selection import train_test_split

    train_X, test_X, train_y, test_y = train_test_split(
        X, y, test_size=0.5, stratify=y, random_state=0
    )
    centre, spread = train_X.mean(axis=0), train_X.std(axis=0)
    spread[spread == 0] = 1.0  # constant in the training half: centred, it has no weight
    A = torch.from_numpy((train_X - centre) / spread)
    B = torch.from_numpy((test_X - centre) / spread)
    labels = torch.nn.functional.one_hot(torch.from_numpy(train_y), num_classes).double()
    stream = keys[:, : len(A)].argsort(dim=-1).reshape(-1)
    return _Subject(A @ A.mT, B @ A.mT, labels, torch.from_numpy(test_y), stream)
