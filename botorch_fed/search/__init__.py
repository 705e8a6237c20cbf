r"""What a site says, and where it looks.

::

    releases    what an aggregation hands to searches
    messages    weight vectors and summaries, and searches that read the rows of others
    thompson    federated Thompson sampling as published, and messages as a prior
    ensemble    the baselines RGPE and TAF
    bandit      one action in a round, from the posterior that everybody has
    sums        searches whose messages are added up; the default one, with a sum of mean functions
    support     FBO-FedGP as published: summaries on a support set
    region      a shrinking region and a model of all agents' data in it
"""
