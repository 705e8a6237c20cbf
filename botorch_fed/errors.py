r"""The exceptions of this package::

    FederatedError
    ├── BasisMismatch    two objects over different feature maps were combined
    └── NumericalError   a factorisation failed; the message names the condition

Malformed tensors raise BoTorch's own `InputDataError` and `BotorchTensorDimensionError`,
so that code written for BoTorch catches what it expects. Messages carry shapes, counts and
fingerprints, never data.
"""


class FederatedError(Exception):
    """Base class of every error this package raises of its own."""


class BasisMismatch(FederatedError, ValueError):
    """Two objects over different feature maps cannot be combined."""


class NumericalError(FederatedError, ArithmeticError):
    """A matrix could not be factorised; nothing was substituted for the result."""
