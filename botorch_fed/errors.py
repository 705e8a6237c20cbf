r"""The exceptions of this package::

    FederatedError
    ├── BasisMismatch    two objects over different feature maps were combined
    ├── BudgetExceeded   a release would cost more privacy than is left; nothing was computed
    ├── MessageError     bytes from outside are no acceptable message
    ├── ObjectiveError   an objective fails wherever it is evaluated
    ├── NumericalError   a factorisation failed; the message names the condition
    └── ProtocolError    a party's part of a protocol cannot go on: settings, records, files

Malformed tensors raise BoTorch's own `InputDataError` and `BotorchTensorDimensionError`,
so that code written for BoTorch catches what it expects. Messages carry shapes, counts and
fingerprints, never data.
"""


class FederatedError(Exception):
    """Base class of every error this package raises of its own."""


class BasisMismatch(FederatedError, ValueError):
    """Two objects over different feature maps cannot be combined."""


class BudgetExceeded(FederatedError):
    """The privacy budget does not cover a release; nothing was computed or sent."""


class MessageError(FederatedError, ValueError):
    """Bytes from outside are malformed, too large, of another version, or not acceptable here."""


class NumericalError(FederatedError, ArithmeticError):
    """A matrix could not be factorised; nothing was substituted for the result."""


class ObjectiveError(FederatedError, RuntimeError):
    """An objective has failed at every point so far; the message holds its last error."""


class ProtocolError(FederatedError, RuntimeError):
    """A party's part of a protocol cannot go on; the message says what to do."""
