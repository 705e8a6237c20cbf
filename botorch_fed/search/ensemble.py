r"""The baselines RGPE and TAF: expected improvement of an ensemble of models, or of every agent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from botorch.acquisition.acquisition import AcquisitionFunction

from botorch_fed.acquisition import TransferAcquisition
from botorch_fed.federation.terms import View
from botorch_fed.models import RankingEnsemble, Summary
from botorch_fed.rng import Generator
from botorch_fed.search.local import expected_improvement
from botorch_fed.search.messages import Others
from botorch_fed.search.thompson import ThompsonSearch


@dataclass(frozen=True, kw_only=True)
class EnsembleSearch(ThompsonSearch):
    """Summaries of the others' data in every query; without any, as `ThompsonSearch`."""

    def _ensemble(self, view: View, others: Others, stream: Generator) -> AcquisitionFunction:
        phi, vectors, model = others.feature_map, others.weights, self.model(view)
        if self.strategy.transfer == "rgpe":
            summaries = Summary.unpack(vectors, basis=phi.fingerprint)
            ensemble = RankingEnsemble(model, summaries, feature_map=phi, generator=stream)
            none = torch.zeros(0, view.terms.space.dim).double()
            return expected_improvement(ensemble, view.X, none)
        summaries = Summary.unpack(vectors[:, :-1], basis=phi.fingerprint)
        return TransferAcquisition(
            model,
            view.Y.max(),
            summaries=summaries,
            feature_map=phi,
            incumbents=vectors[:, -1],
        )
