r"""Handwritten digits: 50 writers each train a small convolutional network on their own digits.

The task of [Dai2021]_: learning rate, its decay and an L2 penalty, all in [1e-7, 0.02],
tuned by validation accuracy; pixels are in [0, 1]. The paper uses the digits of federated EMNIST.
The file read here stands in for them: MNIST's digits by 50 writers of the same series, split nine
to one, so that a writer has 54 to 115 training and 6 to 14 validation digits.

The paper states neither network nor optimiser nor epochs. The form of decay and penalty and the
plan of the network follow the related MNIST task of its first author [Dai2022Meta]_. The rest was
chosen by the objective's spread and smoothness over random points of these data, before any
Bayesian optimisation was run on them:

- 8 filters of 5 x 5, two pixels apart, 2 x 2 maxima, 16 filters of 3 x 3, 64 dense units and 10
  outputs, with rectified linear units. Weights start normal, with variance 2 / fan-in and the same
  for all writers and points, biases at zero;
- step `t = 0, 1, …` has the learning rate `lr / (1 + decay * t)`; `l2` times the sum of all squared
  weights, without biases, is added to the loss;
- 15 epochs of stochastic gradient descent in batches of 32 (25 to 53 steps), with momentum 0.97.
  With 0.9 and 20 epochs values rise up to the largest learning rate: the box does not hold the
  optimum. Batches come from an endless stream of shuffled passes, whose order depends on the seed
  and the writer only;
- the network is the average of the second half of the iterates. The likelihood of the last one is
  jagged: a step of 0.01 in every coordinate moves it by 0.088 (root mean square, four writers),
  against 0.012 for the average. Nor is RMSprop, that author's choice, smooth (0.109, as much as its
  standard deviation over the box), and with Adam 61% of all points share their writer's best
  accuracy;
- float32, for speed: about 25 ms a point. Every call on one machine gives the same values, but
  another processor may round differently and training amplifies that: comparisons should share
  one table.

Accuracy is coarse: over ten writers and 40 random points a writer's takes 6 values, and 44% of all
points share their writer's best one, so that two random guesses usually find "the" optimum. The
default score is therefore the likelihood, the geometric mean of the probabilities given to the
right classes: the same networks, also within [0, 1], without ties. Its median is 0.60 (half of all
values lie in 0.29 to 0.84), and a writer's standard deviation over the box is 0.02 to 0.31 (root
mean square 0.23). A step of 0.01 in every coordinate moves it by 0.032, most at the largest
learning rates. It is best at 0.67 to 0.98 of the range of learning rates, and anywhere in those of
decay and penalty; where corners are looked at too, about one writer in seven prefers the largest
rate without decay or penalty. Writers' best values are 0.15 to 1.00; two writers' values correlate
by 0.82.

.. [Dai2021] Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
   optimization with distributed exploration. NeurIPS 2021.
.. [Dai2022Meta] Z. Dai, Y. Chen, H. Yu, B. K. H. Low, P. Jaillet. On provably robust meta-Bayesian
   optimization. UAI 2022. Code: github.com/daizhongxiang/meta-BO, `run_no_meta_mnist.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from benchmarks.problems.data import load_arrays
from botorch_fed.rng import generator
from botorch_fed.space import Outcome, Parameter, Scale, SearchSpace
from botorch_fed.test_functions.base import FederatedTestProblem, check_points

ORIGIN = (
    "MNIST's training digits and the writer numbers of QMNIST (github.com/facebookresearch/qmnist)"
)
NUM_WRITERS = 50
NUM_CLASSES = 10
BATCH = 32
MOMENTUM = 0.97
# Fan-in and width of every layer; the patches of the first have a column of zeros, so that every
# point's matrices start at a multiple of 64 bytes.
LAYERS = {"conv1": (25, 8), "conv2": (72, 16), "dense": (256, 64), "output": (64, 10)}
CHUNK = 16  # points trained together: what fits in the cache


@dataclass(frozen=True)
class _Writer:
    """One writer's digits: pixels in [0, 1], `n x 28 x 28`, and classes."""

    images: Tensor
    labels: Tensor
    val_images: Tensor
    val_labels: Tensor
    stream: Tensor  # row indices, epoch after epoch


class WriterDigits(FederatedTestProblem):
    """Validation score of a convolutional network on each of 50 writers' digits.

    Points are trained together, and a point's value never depends on the others of the call.

    Args:
        score: ``"likelihood"``: the geometric mean of the probabilities that the network gives to
            the right classes; ``"accuracy"``: the papers' share of digits predicted right.
        scale: Whether the parameters are on a linear scale, as in the papers, or a log scale.
        epochs: How often every training digit is seen.
        seed: Seed of the weights, common to all writers, and of the order of the digits; part of
            the problem's definition.
        data: The folder of `mnist_by_writer.npz`; default the one named by ``BOTORCH_FED_DATA``.

    Example:
        >>> problem = WriterDigits(data="data")
        >>> problem[0](torch.tensor([[0.7, 0.5, 0.5]], dtype=torch.float64))
        tensor([0.8...], dtype=torch.float64)
    """

    def __init__(
        self,
        *,
        score: Literal["likelihood", "accuracy"] = "likelihood",
        scale: Scale = "linear",
        epochs: int = 15,
        seed: int = 0,
        data: str | Path | None = None,
    ) -> None:
        if score not in ("likelihood", "accuracy"):
            raise UnsupportedError(f'score must be "likelihood" or "accuracy", got {score!r}.')
        if epochs < 1:
            raise InputDataError(f"Expected at least 1 epoch, got {epochs}.")
        self.score = score
        self.epochs = epochs
        names = ("learning_rate", "decay", "l2")
        self.space = SearchSpace(
            tuple(Parameter.real(name, 1e-7, 0.02, scale=scale) for name in names),
            Outcome(centre=0.6 if score == "likelihood" else 0.8, scale=0.2),
        )
        self._weights = {
            name: generator(seed, "weights", name).normal(*shape).float() * (2 / shape[0]) ** 0.5
            for name, shape in LAYERS.items()
        }
        arrays = load_arrays(
            "mnist_by_writer.npz", ("X", "y", "writer", "is_val"), folder=data, origin=ORIGIN
        )
        X = torch.from_numpy(arrays["X"].astype(np.float32) / np.float32(255))
        y = torch.from_numpy(arrays["y"].astype(np.int64))
        held_out = torch.from_numpy(arrays["is_val"].astype(np.bool_))
        writers = torch.from_numpy(arrays["writer"].astype(np.int64))
        self._writers = []
        for name in writers.unique()[:NUM_WRITERS].tolist():
            train, val = (writers == name) & ~held_out, (writers == name) & held_out
            n = int(train.sum())
            if epochs * n < BATCH or not val.any():
                raise InputDataError(
                    f"Writer {name} has {n} training and {int(val.sum())} validation digits: "
                    f"expected at least 1 of either, and a batch of {BATCH} in {epochs} epochs."
                )
            keys = generator(seed, "batches", name).uniform(epochs, n)
            stream = keys.argsort(dim=-1).reshape(-1)
            self._writers.append(_Writer(X[train], y[train], X[val], y[val], stream))

    def __len__(self) -> int:
        return len(self._writers)

    def evaluate(self, agent: int, X: Tensor) -> Tensor:
        check_points(X, self.dim)
        logits, labels = self._logits(agent, X), self._writers[agent].val_labels
        if self.score == "accuracy":
            scores = (logits.argmax(dim=-1) == labels).double().mean(dim=-1)
        else:
            right = logits.log_softmax(dim=-1)[:, torch.arange(len(labels)), labels]
            scores = right.mean(dim=-1).exp()
        diverged = ~logits.isfinite().flatten(start_dim=1).all(dim=-1)
        return scores.masked_fill(diverged, 0.0)

    def _logits(self, agent: int, X: Tensor) -> Tensor:
        """Logits of the validation digits, `n x n' x 10`."""
        writer = self._writers[agent]
        settings = torch.tensor(
            [[p["learning_rate"], p["decay"], p["l2"]] for p in self.space.from_unit(X)],
            dtype=torch.float32,
        ).reshape(len(X), 3)
        with torch.inference_mode(False), torch.enable_grad():
            n = len(writer.val_images)
            padded = pad(writer.val_images, (0, 0, 0, 0, 0, -n % BATCH))  # aligned, as batches are
            train_X, val_X = _patches(writer.images), _patches(padded)
            parts = [self._train(writer, train_X, val_X, part) for part in settings.split(CHUNK)]
        return torch.cat(parts)[:, :n].double()

    def _train(self, writer: _Writer, train_X: Tensor, val_X: Tensor, settings: Tensor) -> Tensor:
        """Logits of the validation digits for `k` settings, `k x n' x 10`.

        Products are batched over points, never merged, so that no point's rounding depends on its
        place in the batch.
        """
        k = len(settings)
        rate, decay, l2 = settings.T.reshape(3, k, 1, 1)
        params = {name: W.expand(k, -1, -1).clone() for name, W in self._weights.items()}
        params["conv1"] = pad(params["conv1"], (0, 0, 0, 1))
        for name, (_, width) in LAYERS.items():
            params[f"{name}_bias"] = torch.zeros(k, 1, width)
        velocity = {name: torch.zeros_like(value) for name, value in params.items()}
        mean = {name: torch.zeros_like(value) for name, value in params.items()}
        num_steps = len(writer.stream) // BATCH
        first = num_steps // 2
        for step in range(num_steps):
            rows = writer.stream[step * BATCH : (step + 1) * BATCH]
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            logits = _network(train_X[rows], leaves).reshape(-1, NUM_CLASSES)
            loss = cross_entropy(logits, writer.labels[rows].repeat(k), reduction="sum") / BATCH
            slopes = torch.autograd.grad(loss, list(leaves.values()))
            for (name, value), slope in zip(params.items(), slopes, strict=True):
                if name in LAYERS:
                    slope = slope + 2 * l2 * value
                velocity[name] = MOMENTUM * velocity[name] + slope
                params[name] = value - rate / (1 + decay * step) * velocity[name]
                if step >= first:
                    mean[name] += params[name] / (num_steps - first)
        return _network(val_X, mean)


def _patches(X: Tensor) -> Tensor:
    """The 5 x 5 patches of images, two pixels apart: `n x 4 x 36 x 26`, by place within the pool.

    The last column is zero.
    """
    n = len(X)
    windows = X.unfold(1, 5, 2).unfold(2, 5, 2).reshape(n, 6, 2, 6, 2, 25)
    return pad(windows.permute(0, 2, 4, 1, 3, 5).reshape(n, 4, 36, 25), (0, 1))


def _network(patches: Tensor, params: dict[str, Tensor]) -> Tensor:
    """Logits of `n` images under `k` networks, `k x n x 10`."""
    k, n = len(params["conv1"]), len(patches)
    inputs = patches.transpose(0, 1).flatten(0, 2).expand(k, -1, -1)
    H = torch.bmm(inputs, params["conv1"]).unflatten(1, (4, n * 36)).amax(dim=1)
    H = (H + params["conv1_bias"]).relu().unflatten(1, (n, 6, 6))
    shifted = [H[:, :, r : r + 4, c : c + 4] for r in range(3) for c in range(3)]
    H = torch.stack(shifted, dim=4).flatten(4).flatten(1, 3)
    H = (torch.bmm(H, params["conv2"]) + params["conv2_bias"]).relu()
    H = H.unflatten(1, (n, 16)).flatten(2)
    H = (torch.bmm(H, params["dense"]) + params["dense_bias"]).relu()
    return torch.bmm(H, params["output"]) + params["output_bias"]
