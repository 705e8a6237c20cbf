r"""The default search of FBO-FedGP: a sum of the sites' mean functions, and each site's own model.

What a site adds in a round is the mean of its own posterior on its own standardised scale, over a
shared basis, the weights that trusts in others have earned there, and the number one
(`transfer_search.pack_report`). From the sum a site takes away
exactly what it has put in; what remains, the sum of the others' functions, is the prior of its own
model, with a trust that its own outcomes earn (`transfer_search.TransferSearch`). How a site uses
the sum is its own business; public is the basis alone.

What the sum reveals: the sum of all mean functions, how many sites have three observations or
more, and the sum of the weights of their trusts. With two sites that is the other
one's function. A site alone cannot be read from the sum of many, but from the difference of two
sums over different rosters; and if all others have finished, so that their functions stay as they
are, from the difference of any two: such a run opens one sum (`FedGP`, `active`).

No message is louder than a site's function can be. A site that contributes more than that makes
itself the prior of all others, who test it on their own outcomes: a sum that no honest sites can
have made is left out, any other earns its trust or loses it. It can also pretend to as much
experience with trusts as all honest sites together have: that moves the others' prior
probabilities, which their own outcomes correct.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import MessageError
from botorch_fed.federation.agent import received_basis
from botorch_fed.models import FeatureMap, feature_map_from_tensors
from botorch_fed.models.earned_prior import reference_features
from botorch_fed.protocols.transfer_search import (
    MAX_SPREAD,
    Advice,
    TransferSearch,
    default_feature_map,
    pack_report,
    prior_of_sum,
    report_size,
    unpack_sum,
)
from botorch_fed.space import SearchSpace
from botorch_fed.wire.codec import content_hash, encode

logger = logging.getLogger(__name__)

BOUND = 256.0  # of a weight: ten times the largest of a function that varies by its own scale
_SUM_BITS = 30  # of a sum of weights: what two words of a ciphertext hold, see `precision`
_COARSEST = 2.0**-18
_ROUNDING = 1e-2  # of the spread of a sum of honest functions


@dataclass(frozen=True, eq=False)
class MeanSearch:
    """Public settings of the default search: the basis of the sites' functions.

    Attributes:
        features: The shared basis, as `FeatureMap.to_tensors` gives it.
    """

    features: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def over(cls, space: SearchSpace, feature_map: FeatureMap | None = None) -> MeanSearch:
        """The search over a shared basis; default `transfer_search.default_feature_map`."""
        phi = default_feature_map(space) if feature_map is None else feature_map
        if phi.input_dim != space.dim:
            raise InputDataError(
                f"The feature map has {phi.input_dim} inputs, the search space {space.dim} columns."
            )
        return cls(phi.to_tensors())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the basis."""
        return content_hash(encode(self))

    def __repr__(self) -> str:
        return f"MeanSearch({self.fingerprint})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeanSearch) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def size(self, dim: int) -> int:
        """How many numbers an agent contributes to a sum."""
        return report_size(feature_map(self)) + 1

    def bound(self, num_data: int) -> float:
        """The largest number that an agent contributes."""
        return BOUND

    def precision(self, num_agents: int) -> float:
        """Of the public grid: the finest at which ciphertexts stay small, never a coarse one."""
        return min(2.0 ** (math.ceil(math.log2(num_agents)) - _SUM_BITS), _COARSEST)


@lru_cache(maxsize=8)
def feature_map(search: MeanSearch) -> FeatureMap:
    """The shared basis: public, and made once for all agents of a process."""
    return feature_map_from_tensors(search.features)


def check_received(search: MeanSearch, space: SearchSpace) -> None:
    """Raise `MessageError` unless the basis that a server sent is one over this space."""
    if received_basis(search.features, space).input_dim != space.dim:
        raise MessageError("The shared basis is over another number of inputs.")


def contribution(
    search: MeanSearch,
    strategy: TransferSearch,
    space: SearchSpace,
    X: Tensor,
    Y: Tensor,
    advice: Advice | None,
) -> Tensor:
    """What an agent adds to a sum.

    Args:
        search: The public settings.
        strategy: The agent's own.
        space: The map of inputs.
        X: Own points, `n x d`.
        Y: Own outcomes, `n x 1`, larger is better.
        advice: What the last sum says.

    Returns:
        A `search.size(d)` tensor; zeros if the agent has too few observations to say anything.
    """
    phi = feature_map(search)
    packed = pack_report(phi, strategy.report(space, phi, X, Y, advice))
    loudest = float(packed[: phi.num_features].abs().max())
    if loudest > BOUND:
        packed[: phi.num_features] *= BOUND / loudest
    return packed


def advice(search: MeanSearch, total: Tensor, own: Tensor | None, num_agents: int) -> Advice | None:
    """What the others say in a sum; None if nobody does, or nobody honest can have said it.

    Args:
        search: The public settings.
        total: The sum.
        own: What oneself has put into it; None if nothing.
        num_agents: How many agents there are.
    """
    phi = feature_map(search)
    others = unpack_sum(total, own)
    if not 1 <= others.num_sites <= num_agents:
        return None
    spread = float((reference_features(phi) @ others.weights).std()) / others.num_sites
    if not spread <= MAX_SPREAD * (1 + _ROUNDING):
        logger.warning("a sum of functions that honest sites cannot have is left out")
        return None
    prior = prior_of_sum(phi, others.weights, others.num_sites)
    if prior is None:
        return None
    # Less than none is no experience, nor is more than there are sites.
    weights, room = others.trust, others.num_sites * (1 + _ROUNDING)
    believable = float(weights.min()) >= -_ROUNDING and float(weights.sum()) <= room
    return Advice(prior, others.trust if believable else None)
