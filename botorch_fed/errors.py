r"""The exceptions of this package::

    FederatedError
    ├── BasisMismatch    two objects over different feature maps were combined
    ├── BudgetExceeded   a release would cost more than the privacy budget; nothing was computed
    ├── MessageError     received bytes are no acceptable message
    ├── ObjectiveError   an objective has failed at every point so far
    ├── NumericalError   a factorisation failed; the message names the condition
    └── ProtocolError    a party cannot continue a protocol: settings, records, files

Malformed tensors raise BoTorch's `InputDataError` and `BotorchTensorDimensionError`, so that code
written for BoTorch catches them. Error messages hold shapes, counts and fingerprints, never data.
"""


class FederatedError(Exception):
    """Base class of the errors that this package defines."""


class BasisMismatch(FederatedError, ValueError):
    """Two objects over different feature maps cannot be combined."""


class BudgetExceeded(FederatedError):
    """The privacy budget does not cover a release; nothing was computed or sent."""


class MessageError(FederatedError, ValueError):
    """Received bytes are malformed, too large, of another version, or not accepted here."""


class NumericalError(FederatedError, ArithmeticError):
    """A matrix could not be factorised; no result was substituted."""


class ObjectiveError(FederatedError, RuntimeError):
    """An objective has failed at every point so far; the message holds its last error."""


class ProtocolError(FederatedError, RuntimeError):
    """A party cannot continue a protocol; the message says what to do."""
