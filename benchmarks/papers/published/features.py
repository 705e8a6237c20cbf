r"""The random features of the experiments of [Dai2020FTS]_, [Dai2021]_ and FBO-FedGP.

.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020.
.. [Dai2021] Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
   optimization with distributed exploration. NeurIPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

from botorch.exceptions.errors import BotorchTensorDimensionError
from gpytorch.kernels import Kernel
from torch import Tensor

from botorch_fed.models import RandomFourierFeatures, StationaryKernel, register_feature_map
from botorch_fed.models.numerics import as_double, check_finite
from botorch_fed.rng import Generator


@register_feature_map("paper_cosine")
class PaperCosine(RandomFourierFeatures):
    r""":math:`\sqrt{2/M} \cos(\omega_i^\top x + b_i)`, each point divided by its own norm.

    The division makes the kernel non-stationary, and the norm constraint replaces a prior. The mean
    error is that of `RandomFourierFeatures.draw` with as many features.

    Args:
        kernel: The kernel that the features approximate.
        frequencies: An `M x d` tensor of frequencies.
        phases: An `M` tensor of phases.
    """

    phases: Tensor

    def __init__(self, kernel: StationaryKernel, frequencies: Tensor, phases: Tensor) -> None:
        super().__init__(kernel, frequencies)
        phases, count = as_double(phases, "phases"), len(frequencies)
        if phases.shape != (count,):
            raise BotorchTensorDimensionError(
                f"phases must have shape ({count},), got {tuple(phases.shape)}."
            )
        check_finite(phases, "phases")
        self.register_buffer("phases", phases, persistent=False)
        self.num_features = count

    @classmethod
    def draw(  # type: ignore[override]  # no orthogonal blocks
        cls,
        kernel: Kernel | StationaryKernel,
        num_features: int,
        *,
        generator: Generator,
        input_dim: int | None = None,
    ) -> Self:
        """Draw frequencies from the spectral density of a kernel, and phases."""
        spec = StationaryKernel.from_gpytorch(kernel, input_dim)
        frequencies = spec.sample_frequencies(num_features, generator=generator)
        return cls(spec, frequencies, 2 * math.pi * generator.uniform(num_features))

    def _features(self, X: Tensor) -> Tensor:
        cosines = (X @ self.frequencies.mT + self.phases).cos()
        return self.kernel.outputscale.sqrt() * cosines / cosines.norm(dim=-1, keepdim=True)

    def with_hyperparameters(self, lengthscale: Tensor, outputscale: Tensor) -> Self:
        scaled = super().with_hyperparameters(lengthscale, outputscale)
        return type(self)(scaled.kernel, scaled.frequencies, self.phases)

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = {
            name.replace("random_fourier/", "paper_cosine/"): value
            for name, value in super().to_tensors().items()
        }
        return {**tensors, "paper_cosine/phases": self.phases.detach()}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        scaled = RandomFourierFeatures._from_tensors(tensors)
        return cls(scaled.kernel, scaled.frequencies, tensors["phases"])
