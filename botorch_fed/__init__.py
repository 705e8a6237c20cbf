r"""Federated and private Bayesian optimisation on BoTorch.

Rooms (each imports only from rooms above it; `test/test_layering.py` keeps it so)::

    errors    the exceptions of this package
    rng       reproducible random numbers by a published recipe
    space     the public map between a site's parameters and the shared unit cube
    models    feature maps, additive summaries, and the BoTorch models made of them
    acquisition  where to look next: schedules, Thompson sampling, transfer
    privacy   noisy sums, what they cost, and the audit of both
    wire      the codec of messages and state files
    protocols  agents and servers as pure state machines, and the one loop that drives them
    engines   what carries their bytes
    test_functions  federated test problems
    run       a whole run in one call, and its result

This package imports nothing: ``import botorch_fed.models`` pays for models only.
"""

from botorch_fed.version import __version__ as __version__
