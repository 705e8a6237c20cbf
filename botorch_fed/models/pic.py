r"""`PICGP`: own data exactly, everybody else's through their summaries.

PITC predicts every point as if it lay in a block of its own, so that an agent's prediction between
two of its own observations knows of them only what the shared basis can carry. PIC [Snelson2007]_
puts the point into the block of the agent that asks: with the weights as others leave them,

.. math:: w \sim N(B_o^{-1} b_o, B_o^{-1}), \quad B_o = I + \textstyle\sum_{j \ne i} G_j, \qquad
          f(x) = \mu + \phi(x)^\top w + g(x), \quad g \sim GP(0, r),

where `r` is what the map misses, the agent's own :math:`(X, y)` condition both `w` and `g`. With
:math:`C = r(X, X) + \sigma^2 I = LL^\top`, :math:`W = L^{-1} \Phi`, :math:`v = L^{-1}(y - \mu)` (the
agent's `LocalBlock`) and :math:`s(x) = L^{-1} r(X, x)`,

.. math:: f(x) \mid w, y \sim N\bigl(\mu + (\phi(x) - W^\top s(x))^\top w + s(x)^\top v,\;
          r(x, x') - s(x)^\top s(x')\bigr),

and the weights given everything are those of PITC: the total of all summaries, own block included.
So one prediction costs :math:`O(n(n + M) + M^2)`, nothing else is received than for PITC, and the
own step needs no other message. For maps without residual PIC *is* PITC; without received summaries
it is the exact Gaussian process of the agent's data.

.. [Snelson2007] E. Snelson, Z. Ghahramani. Local and global sparse Gaussian process approximations.
   AISTATS 2007.
.. [Chen2013] J. Chen et al. Parallel Gaussian process regression with low-rank covariance matrix
   approximations. UAI 2013.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Size, Tensor

from botorch_fed.errors import NumericalError
from botorch_fed.models.basis_gp import BasisGP
from botorch_fed.models.features import FeatureMap
from botorch_fed.models.numerics import as_double, solve_rows
from botorch_fed.models.paths import draw_matheron_parts, joined, kernel_path
from botorch_fed.models.summary import LocalBlock, Summary, summarize
from botorch_fed.rng import Generator, fresh
